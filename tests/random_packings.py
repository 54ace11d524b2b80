"""Random packings and pools: calls that nobody thought of, each sequence of them against the recurrence in float64.

The draws of a round lie behind each other in the same tensors. So they are made at once, and one recurrence, which
advances all sequences together, computes the truth of all. The tokens between two draws are NaN.
"""

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from serving_truth import bits

import flash_delta
from flash_delta.testing import Workload, activations, allowed, make_tensors, options, products_in
from flash_delta.testing.accuracy import recurrence
from flash_delta.testing.large import run_workload

TOKENS = ("q", "k", "v", "g", "beta")
WIDE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
ALIGNED = 16  # tokens; a draw begins at a multiple of these, so that all draws have the same kernels


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for. Draws of a form differ in lengths, slots and values."""

    member: str
    H: int
    HV: int
    K: int = 128
    raw: bool = True  # norms, gates and sigmoid in the op
    gates: str = ""
    pool: torch.dtype | None = None  # None: a call without a pool
    checkpoints: str = ""  # on a pool: "stride" or "offsets"
    batch_invariant: bool = False
    v_first: bool = True

    def workload(self, lengths):
        dtype = str(self.pool or torch.float32).removeprefix("torch.")
        return Workload(
            "random", "forward", self.member, self.H, self.HV, len(lengths), max(lengths), lengths=tuple(lengths),
            l2norm=self.raw, raw=self.raw, gates=self.gates, K=self.K, V=self.K, state_dtype=dtype,
        )  # fmt: skip

    def __str__(self):
        changes = [f"{self.member} {self.H}/{self.HV}", f"{self.K} wide", self.gates or ("raw" if self.raw else "logs")]
        if self.pool:
            changes += [f"pool {self.pool}".replace("torch.", ""), "v-first" if self.v_first else "k-first"]
        return ", ".join([*changes, *filter(None, (self.checkpoints, "batch invariant" * self.batch_invariant))])


F32, B16 = torch.float32, torch.bfloat16
FORMS = [
    Form("gdn", 2, 4),
    Form("gdn", 4, 8, raw=False),
    Form("gdn", 3, 6, 64),
    Form("gdn", 8, 8, batch_invariant=True),
    Form("kda", 4, 4),
    Form("kda", 2, 4, gates="unbounded"),
    Form("kda", 8, 8, raw=False),
    Form("gdn", 2, 4, pool=F32),
    Form("gdn", 4, 8, pool=B16, checkpoints="stride", v_first=False),
    Form("gdn", 1, 2, pool=F32, checkpoints="offsets"),
    Form("gdn", 8, 8, raw=False, pool=F32, checkpoints="stride", batch_invariant=True),
    Form("gdn", 2, 4, 64, pool=B16, checkpoints="stride"),
    Form("kda", 4, 4, pool=F32, checkpoints="stride"),
    Form("kda", 2, 4, gates="unbounded", pool=B16, checkpoints="offsets", v_first=False),
    Form("kda", 8, 8, gates="unbounded", pool=F32, checkpoints="stride", batch_invariant=True),
    Form("kda", 2, 2, raw=False, pool=F32, checkpoints="stride"),
]


def draw_lengths(draw, sequences, tokens):
    """Draws the lengths of at most so many sequences, with at most so many tokens together. Some are empty."""
    count, total = draw.randint(1, sequences), draw.randint(0, tokens)
    sizes = {
        "equal": lambda: 1.0,
        "uniform": draw.random,
        "lognormal": lambda: draw.lognormvariate(0, 1.3),
        "one long": lambda: 0.002,
    }
    kind = draw.choice(list(sizes))
    shares = [0.0 if draw.random() < 0.1 else sizes[kind]() for _ in range(count)]
    if kind == "one long":
        shares[draw.randrange(count)] = 1.0
    return [int(share / max(sum(shares), 1e-9) * total) for share in shares]


class Round:
    """So many draws of a form, and what they have to give."""

    def __init__(self, form, draws, seed, device, sequences=40, tokens=3000):
        self.form, self.seed, self.device, self.draw = form, seed, device, random.Random(seed)
        self.lengths, self.draws = [], []  # a draw: its first sequence, and the one behind its last
        for _ in range(draws):
            lengths = draw_lengths(self.draw, sequences, tokens)
            self.draws.append((len(self.lengths), len(self.lengths) + len(lengths)))
            behind = -sum(lengths) % ALIGNED + ALIGNED * self.draw.randint(0, 5)
            self.lengths += [*lengths, behind]
        self.bounds = [0, *accumulate(self.lengths)]
        self.workload = form.workload(self.lengths)
        self.x = make_tensors(self.workload, device, seed)
        self.between = torch.zeros(len(self.lengths), dtype=torch.bool, device=device)
        self.between[[last for _, last in self.draws]] = True
        self.of_token = torch.arange(len(self.lengths), device=device).repeat_interleave(self.tensor(self.lengths))
        for name in TOKENS:
            self.x[name][0, self.between[self.of_token]] = torch.nan
        self.dead = torch.zeros_like(self.between)  # sequences without a slot
        self.goals = []  # (sequence, tokens) of every checkpoint
        if form.pool is not None:
            self._choose_slots()
        self._know()

    def tensor(self, values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _choose_slots(self):
        """Slots in no order. Of the pool, all that no sequence reads is NaN."""
        draw, count = self.draw, len(self.lengths)
        self.every = 64 * draw.randint(1, 3)
        self.offsets, self.has = [-1] * count, [draw.random() < 0.8 for _ in range(count)]
        read, write, self.states, slots = [-1] * count, [-1] * count, [], 0

        def slot():
            nonlocal slots
            slots += 1
            return -1 if draw.random() < 0.05 else slots - 1

        kept, columns = [[] for _ in range(count)], [0] * count
        for first, last in self.draws:
            for n in range(first, last):
                length = self.lengths[n]
                read[n] = slot() if self.has[n] else -1
                write[n] = read[n] if self.has[n] and draw.random() < 0.3 else slot()
                dead = write[n] < 0 or (self.has[n] and read[n] < 0)
                self.dead[n] = dead
                goals = [self.every * (m + 1) for m in range(length // self.every)]
                if self.form.checkpoints == "offsets":
                    self.offsets[n] = draw.randint(-1, length + 1)
                    goals = [self.offsets[n]]
                for goal in goals if self.form.checkpoints else ():
                    kept[n].append(slot())
                    if 0 <= goal <= length and kept[n][-1] >= 0 and not dead:
                        self.states.append((kept[n][-1], n, len(self.goals)))
                        self.goals.append((n, goal))
                if not dead:
                    self.states.append((write[n], n, None))
            columns[first:last] = [max(1, *map(len, kept[first:last]))] * (last - first)
        places = list(range(slots + 3))
        draw.shuffle(places)
        at = self.tensor([*places, -1])  # -1 stays -1
        self.read, self.write = at[self.tensor(read)], at[self.tensor(write)]
        self.kept = [at[self.tensor(ids + [-1] * (n - len(ids)))] for ids, n in zip(kept, columns, strict=True)]
        self.states = [(places[slot], n, goal) for slot, n, goal in self.states]
        given = self.x["initial_state"].mT if self.form.v_first else self.x["initial_state"]
        self.pool = given.new_full((len(places), *given.shape[1:]), torch.nan)
        reads = self.read >= 0
        self.pool[self.read[reads]] = given[reads]
        self.x["initial_state"][~self.tensor(self.has, torch.bool)] = 0

    @torch.no_grad()
    def _know(self):
        """The truth, and the errors of the torch backend with operands of products in bfloat16."""
        wide = {name: self.x[name].double() for name in WIDE if name in self.x}
        member, given = self.workload.op, options(self.workload) | {"cu_seqlens": self.x["cu_seqlens"]}
        self.kept_states = None

        def rule(*arguments, **more):
            o, final, self.kept_states = together(*arguments, **more, goals=self.goals)
            return o, final

        self.o, self.final = recurrence(member, wide, given, rule)
        with products_in(torch.bfloat16):
            reference = run_workload(self.workload, self.x, None, "torch")
        self.o_limits = allowed(self._errors(reference["o"]), torch.bfloat16)
        self.state_limits = allowed(relative(reference["final_state"], self.final), torch.bfloat16)

    def _errors(self, o):
        """Returns the relative error of o for each sequence."""
        sums = torch.zeros(2, len(self.lengths), dtype=torch.float64, device=self.device)
        for total, t in zip(sums, (o.double() - self.o, self.o), strict=True):
            total.index_add_(0, self.of_token, t[0].square().sum((1, 2)))
        return (sums[0].sqrt() / (sums[1].sqrt() + 1e-30)).nan_to_num(torch.inf)

    def run(self, backend=None):
        """o of all draws, and their final states, or the pool."""
        parts, finals = [], []
        self.after = None if self.form.pool is None else self.pool.clone()
        for first, last in self.draws:
            start, stop = self.bounds[first], self.bounds[last + 1]
            call = {name: self.x[name][:, start:stop] for name in TOKENS}
            call |= {name: self.x[name] for name in ("A_log", "dt_bias") if name in self.x}
            call["cu_seqlens"] = self.x["cu_seqlens"][first : last + 1] - start
            if self.form.pool is None:
                o, final = self._forward(call, first, last, backend)
                finals.append(final)
            else:
                o = self._prefill(call, first, last, backend)
            parts.append(o)
        return torch.cat(parts, 1), torch.cat(finals) if finals else self.after

    def _forward(self, call, first, last, backend):
        if self.device != "cpu" and self.draw.random() < 0.5:
            call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
        call |= options(self.workload) | {"initial_state": self.x["initial_state"][first:last]}
        return self.workload.op.op(**call, batch_invariant=self.form.batch_invariant, backend=backend)

    def _prefill(self, call, first, last, backend):
        op = flash_delta.prefill_kda if self.form.member == "kda" else flash_delta.prefill_gated_delta_rule
        call |= activations(self.workload) | {"has_initial_state": self.tensor(self.has[first:last], torch.bool)}
        call |= {"read_indices": self.read[first:last].clone(), "write_indices": self.write[first:last].clone()}
        if not self.form.batch_invariant and self.draw.random() < 0.5:
            call["max_prompts"] = sum(length > 16 for length in self.lengths[first:last])
        if self.form.checkpoints:
            table = torch.stack(self.kept[first:last])
            if self.form.checkpoints == "stride":
                call |= {"checkpoint_indices": table, "checkpoint_every": self.every}
            else:
                offsets = self.tensor(self.offsets[first:last])
                call |= {"checkpoint_indices": table[:, 0].contiguous(), "checkpoint_offsets": offsets}
        call |= {"batch_invariant": self.form.batch_invariant, "state_v_first": self.form.v_first}
        return op(**call, state_pool=self.after, backend=backend)

    def judge(self, o, states):
        """What is wrong, in words; and by how much of what is allowed the worst result is off."""
        zeros = self.between | self.dead
        errors = self._errors(o)
        errors[zeros] = 0
        sums = torch.zeros(len(self.lengths), device=self.device)
        sums.index_add_(0, self.of_token, (o[0] != 0).sum((1, 2)).float())
        errors[zeros & (sums > 0)] = torch.inf
        judged = [("o", range(len(self.lengths)), errors, self.o_limits.masked_fill(zeros, 1.0))]
        if self.form.pool is None:
            real = (~self.between).nonzero().flatten()
            judged.append(("final state", real.tolist(), relative(states, self.final[real]), self.state_limits[real]))
        else:
            judged += self._judge_pool(states)
        wrong, worst = [], 0.0
        for name, sequences, off, limits in judged:
            assert limits.isfinite().all()
            ratios = off / limits
            worst = max(worst, float(ratios.max())) if len(ratios) else worst
            for i in (ratios > 1).nonzero().flatten().tolist():
                wrong.append(self._told(name, sequences[i], float(off[i]), float(limits[i])))
        return wrong, worst

    def _judge_pool(self, pool):
        slots = self.tensor([slot for slot, _, _ in self.states])
        owners = [n for _, n, _ in self.states]
        wanted = [self.final[n] if goal is None else self.kept_states[goal] for _, n, goal in self.states]
        got = pool[slots].mT if self.form.v_first else pool[slots]
        if wanted:
            yield "state", owners, relative(got, torch.stack(wanted)), self.state_limits[owners]
        others = torch.ones(len(pool), dtype=torch.bool, device=self.device)
        others[slots] = False
        changed = (bits(pool[others]) != bits(self.pool[others])).flatten(1).any(1)
        yield "a slot of nobody", [None] * len(changed), changed.double(), torch.full_like(changed, 0.5, dtype=float)

    def _told(self, name, n, error, limit):
        said = f"{self.form}, seed {self.seed}: {name}"
        if n is None:
            return f"{said} has changed"
        for number, (first, last) in enumerate(self.draws):
            if first <= n <= last:
                where = "behind its sequences" if n == last else f"sequence {n - first} of {self.lengths[n]} tokens"
                return f"{said} of draw {number}, {where}, is off by {error:.1e}, {limit:.1e} is allowed"


def relative(got, want):
    """The relative L2 error of each row."""
    off, size = (t.flatten(1).norm(dim=1) for t in (got.double() - want, want))
    return (off / (size + 1e-30)).nan_to_num(torch.inf)


def together(q, k, v, g, beta, *, scale, erase, initial_state, cu_seqlens, goals=()):
    """Runs `recurrent` for all sequences at once. ``goals``: pairs of a sequence and a number of its tokens, after
    which its state is returned, too."""
    assert erase == "decayed"
    scale = q.shape[3] ** -0.5 if scale is None else scale
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    place = {n: i for i, n in enumerate(order)}
    S = initial_state[order].unflatten(1, (q.shape[2], -1))  # [N, H, HV / H, K, V]; the longest first
    kept = S.new_empty(len(goals), *S.shape[1:])
    after = {}
    for i, (n, tokens) in enumerate(goals):
        after.setdefault(tokens, []).append((i, place[n]))
    starts = torch.tensor(cu_seqlens[:-1], device=q.device)[order]
    groups, live, places, outputs = S.shape[1:3], len(order), [], []
    for t in range(max(lengths, default=0) + 1):
        if t in after:
            to, of = zip(*after[t], strict=True)
            kept[list(to)] = S[list(of)]
        while live and lengths[order[live - 1]] <= t:
            live -= 1
        rows, now = starts[:live] + t, S[:live]
        q_t, k_t = (x[0, rows, :, None, None] for x in (q, k))  # [n, H, 1, 1, K]
        v_t, b_t = (x[0, rows].unflatten(1, groups).unsqueeze(3) for x in (v, beta.unsqueeze(3)))
        decay = g[0, rows].exp().unflatten(1, groups)
        now *= decay[..., None] if g.dim() == 4 else decay[..., None, None]
        now.addcmul_(k_t.mT * b_t, v_t - k_t @ now)
        places.append(rows)
        outputs.append((scale * q_t @ now).flatten(1, 3))
    o, final = torch.zeros_like(v), torch.empty_like(initial_state)
    o[0, torch.cat(places)] = torch.cat(outputs)
    final[order] = S.flatten(1, 2)
    return o, final, kept.flatten(1, 2)
