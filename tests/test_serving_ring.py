"""Drafts that leave records: the bits of single tokens, whoever applies the records, and nothing else is touched."""

import random
from dataclasses import dataclass

import pytest
import torch
from serving_truth import CALLS, DEVICES, bits, make_call, needs_triton, slots
from test_serving_packed import packed, padded
from test_serving_step import make_step

from flash_delta.ops.serving import Convolution, Ring, commit

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
backends = pytest.mark.parametrize("backend", BACKENDS)
POOLS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS, GATES = ("q", "k", "v", "g", "beta", "b", "w"), ("A_log", "dt_bias")
NAN = float("nan")


def make_ring(x, pages=6, room=4):
    """k, u and decay of a ring for calls like x; what nobody wrote is NaN."""
    (H, K), (HV, V), width = x["k"].shape[2:], x["v"].shape[2:], x["g"].shape[3:]
    like = x["state_pool"].new_empty(0, dtype=torch.float32)
    return [like.new_full((pages, room, *head), NAN) for head in ((H, K), (HV, V), (HV, *width))]


def decode(kind, x, backend, **more):
    return CALLS[kind][0](**(x | more), backend=backend)


def at(x, *tokens):
    """The call with some tokens of its rows."""
    return x | {name: x[name][:, list(tokens)] for name in TOKENS if name in x}


def one_by_one(kind, x, backend):
    """Outputs of all tokens, and the pool before and after each."""
    pools, o = [x["state_pool"]], []
    for t in range(x["v"].shape[1]):
        pool = pools[-1].clone()
        o.append(decode(kind, at(x, t), backend, state_pool=pool, write_indices=x["read_indices"]))
        pools.append(pool)
    return torch.cat(o, 1), pools


@backends
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["gdn", "gdn-raw", "kda-bounded", "gdn2-raw"])
def test_the_bits_of_single_tokens(kind, pool, v_first, backend):
    """A draft, and then the states after some of its tokens: by `commit`, and by the next call."""
    device = DEVICES[backend]
    x = make_call(kind, B=3, pool=POOLS[pool], v_first=v_first, device=device)
    want, pools = one_by_one(kind, x, backend)
    records, pages, counts = make_ring(x), slots([4, 1, 0], x), slots([2, 0, 3], x, torch.int32)
    before = x["state_pool"].clone()
    assert torch.equal(decode(kind, x, backend, ring=Ring(*records, write=pages)), want)
    assert torch.equal(bits(x["state_pool"]), bits(before))
    assert all(t[[2, 3, 5]].isnan().all() and t[[4, 1, 0], 3].isnan().all() for t in records)
    after, pages = before.clone(), slots([4, -1, 0], x)  # without a record to apply, no page is needed
    ring = Ring(*records, read=pages, counts=counts)
    commit(
        after, ring, x["read_indices"], slots([5, 6, 7], x), slots([1, 0, 4], x), state_v_first=v_first, backend=backend
    )
    expected = before.clone()
    for b, count in enumerate(counts.tolist()):
        expected[b] = pools[count][b]
    expected[5], expected[6] = pools[1][0], before[1]  # the third row has no state after a fourth record
    assert torch.equal(bits(after), bits(expected))
    y = make_call(kind, B=3, T=2, pool=POOLS[pool], v_first=v_first, device=device, seed=7)
    y |= {name: x[name] for name in GATES if name in x}
    want = decode(kind, y, backend, state_pool=expected)
    next_pool, ring = before.clone(), ring._replace(write=slots([2, 3, 1], x))
    o = decode(kind, y, backend, state_pool=next_pool, write_indices=slots([0, 8, 2], x), ring=ring)
    assert torch.equal(o, want)
    expected[[5, 6]], expected[8] = before[[5, 6]], before[1]
    assert torch.equal(bits(next_pool), bits(expected))


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
def test_layers_are_one_call(kind, backend):
    calls = [make_call(kind, B=2, slots=4, device=DEVICES[backend], seed=seed) for seed in range(3)]
    rings = [make_ring(x) for x in calls]
    pages, counts, rows = slots([4, 1], calls[0]), slots([3, 2], calls[0]), calls[0]["read_indices"]
    for x, records in zip(calls, rings, strict=True):
        decode(kind, x, backend, ring=Ring(*records, write=pages))
    pools = torch.stack([x["state_pool"] for x in calls])
    ring = Ring(*map(torch.stack, zip(*rings, strict=True)), read=pages, counts=counts)
    gaps = torch.full((3, 5, *pools.shape[2:]), NAN, device=pools.device)[:, :4].copy_(pools)
    for stack in (pools, gaps):
        commit(stack, ring, rows, state_v_first=True, backend=backend)
    for pool, x, records in zip(pools, calls, rings, strict=True):
        commit(x["state_pool"], Ring(*records, read=pages, counts=counts), rows, state_v_first=True, backend=backend)
        assert torch.equal(pool, x["state_pool"])
    assert torch.equal(gaps, pools)


@backends
def test_no_rows(backend):
    x = make_call(B=2, T=2, device=DEVICES[backend])
    records, none = make_ring(x), slots([], x)
    x |= {"read_indices": none} | {name: x[name][:0] for name in TOKENS if name in x}
    assert decode("gdn", x, backend, ring=Ring(*records, write=none)).shape == x["v"].shape


@backends
def test_padding(backend):
    """A row without a slot, without a page or with a count out of range gives zeros, and touches nothing."""
    x = make_call(B=9, T=2, slots=12, device=DEVICES[backend]) | {"null_slot": 8}
    x["read_indices"] = slots([0, -1, 2, 3, 4, 5, 6, 7, 8], x)
    records = [torch.randn_like(t) for t in make_ring(x, pages=9)]
    write, read = slots([1, 2, 9, 4, 5, -1, 7, 8, 0], x), slots([3, 3, 3, 3, 6, 3, 9, -1, 3], x)
    counts, to = slots([1, 1, 1, 5, -1, 1, 1, 0, 1], x), slots([0, 1, 2, 3, 4, 5, 6, 8, 9], x)
    ring, before = Ring(*(t.clone() for t in records), write, read, counts), x["state_pool"].clone()
    o = decode("gdn", x, backend, write_indices=to, ring=ring)
    assert o[0].all()
    assert not o[1:].any()
    changed = [n for n in range(12) if not torch.equal(x["state_pool"][n], before[n])]
    assert changed == [0]
    for t, old in zip(ring, records, strict=False):
        assert [n for n in range(9) if not torch.equal(t[n], old[n])] == [1]
    commit(before, ring, x["read_indices"], null_slot=8, state_v_first=True, backend=backend)
    want = x["state_pool"].clone()
    rest = slots([2, 5], x)  # without a page to write these rows are no padding
    commit(
        want, Ring(*ring[:3], read=slots([3, 3], x), counts=slots([1, 1], x)), rest, state_v_first=True, backend=backend
    )
    assert torch.equal(before, want)


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "gdn2-raw"])
def test_packed_rows(kind, backend):
    """Packed rows give the bits of rows of one length, in o, states and records."""
    lengths = [3, 0, 1, 4, 2]
    x, _ = make_step(kind, B=5, T=4, H=1, HV=2, V=8, device=DEVICES[backend])
    records, again = make_ring(x, 10), make_ring(x, 10)
    first, then = slots([0, 1, 2, 3, 4], x), slots([5, 6, 7, 8, 9], x)
    decode(kind, x, backend, ring=Ring(*records, write=first))
    for t, old in zip(again, records, strict=True):
        t.copy_(old)
    pools = x["state_pool"].clone(), x["state_pool"].clone()
    counts = slots([4, 1, 0, 2, 3], x)
    ring = Ring(*records, then, first, counts)
    want = decode(kind, x, backend, state_pool=pools[0], write_indices=first, ring=ring)
    call = packed(x, lengths, behind=2)
    ring = ring._replace(**dict(zip("ku", again, strict=False)), decay=again[2])
    o = decode(kind, call, backend, state_pool=pools[1], write_indices=first, ring=ring)
    assert not o[0, sum(lengths) :].any()
    assert torch.equal(padded(o, lengths), torch.where(padded(o, lengths) == 0, 0, want))
    for b, length in enumerate(lengths):
        assert torch.equal(pools[1][b], pools[0][b] if length else x["state_pool"][b])
        for t, old in zip(again, records, strict=True):
            assert torch.equal(t[5 + b, :length], old[5 + b, :length])
            assert t[5 + b, length:].isnan().all()


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
def test_a_layer(kind, backend):
    """With a rolling convolution and a norm: the bits of drafts with a slot for the state after each token."""
    chance, T, W = random.Random(3), 3, 4
    states = windows = None
    for step in range(4):
        x, conv = make_step(kind, W=W, B=2, T=T, H=1, HV=2, V=8, slots=8, seed=step, device=DEVICES[backend])
        if states is None:
            states = [x["state_pool"].clone(), x["state_pool"].clone()]
            windows = [conv[0].new_zeros(8, conv[0].shape[1], W + 2) for _ in range(2)]
            records, counts, pending = make_ring(x), [1, 1], [0, 0]
            table = slots([[0, 2, 3], [1, 4, 5]], x)
        call = x | {"num_accepted_tokens": slots(counts, x)}
        convolutions = [Convolution(pool, *conv[1:], rolling=True) for pool in windows]
        tabled = {"read_indices": table, "write_indices": table, "convolution": convolutions[0]}
        want = decode(kind, call, backend, state_pool=states[0], **tabled)
        pages = [slots([2 * b + (step + turn) % 2 for b in range(2)], x) for turn in range(2)]
        ring, rows = Ring(*records, pages[1], pages[0], slots(pending, x)), table[:, 0].contiguous()
        recorded = {"read_indices": rows, "write_indices": rows, "convolution": convolutions[1], "ring": ring}
        assert torch.equal(decode(kind, call, backend, state_pool=states[1], **recorded), want)
        assert torch.equal(windows[1], windows[0])
        counts = pending = [chance.randint(1, T) for _ in range(2)]


BAD = {
    "ring: expected a Ring or None, got list": {"ring": []},
    "ring.write: expected a tensor [2], got None": {"write": None},
    "ring.counts: expected a tensor [2], got None": {"counts": None},
    "ring.u: expected dtype torch.float32": {"u": lambda t: t.bfloat16()},
    "ring.k: expected room for 3 tokens": {"k": lambda t: t[:, :2].contiguous()},
    "ring.decay: expected a tensor without gaps": {"decay": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)},
    "parent_idx: expected None (with a ring)": {
        "parent_idx": torch.zeros(2, 3, dtype=torch.int64), "write_indices": torch.zeros(2, 3, dtype=torch.int64),
    },
    "write_indices: expected a tensor [2], got shape [2, 3]": {"write_indices": torch.zeros(2, 3, dtype=torch.int64)},
    "write_indices: expected None with a ring without read": {"read": None, "counts": None},
    "ring.k: expected a tensor [pages, S, 1, 16]": {"k": lambda t: t[0]},
}  # fmt: skip


@pytest.mark.parametrize("error", BAD)
def test_bad_arguments_are_named(error):
    x = make_call(B=2, T=3)
    ring = Ring(*make_ring(x), slots([0, 1], x), slots([2, 3], x), slots([0, 0], x))._asdict()
    more, call = BAD[error], {"write_indices": slots([0, 1], x)}
    for name, value in more.items():
        if name in ring:
            ring[name] = value(ring[name]) if callable(value) else value
        else:
            call[name] = value
    with pytest.raises(ValueError, match="decode_gated_delta_rule: ") as raised:
        decode("gdn", x, None, **{"ring": Ring(**ring)} | call)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("error", "more"),
    [
        ("null_slot: expected a number of at least 0", {"null_slot": "0"}),
        ("state_v_first: expected True or False", {"state_v_first": "False"}),
        ("checkpoint_offsets: expected a tensor [2], got None", {"checkpoint_indices": torch.tensor([0, 1])}),
        ("state_pool: expected at least one layer", {"layers": 0}),
        ("state_pool: expected no stride of 0", {"layers": 2}),
    ],
)
def test_bad_arguments_of_commit_are_named(error, more):
    x = make_call(B=2, T=3)
    pool, records, rows = x["state_pool"], make_ring(x), slots([0, 1], x)
    if "layers" in more:
        pool, *records = (t.expand(more["layers"], *t.shape) for t in (pool, *records))
        records = [t.contiguous() for t in records]
    ring = Ring(*records, read=rows, counts=rows)
    options = {"state_v_first": True} | {name: value for name, value in more.items() if name != "layers"}
    with pytest.raises(ValueError, match="commit: ") as raised:
        commit(pool, ring, rows, **options)
    assert error in str(raised.value)


def test_shared_pages_are_refused_on_a_cpu():
    x = make_call(B=2, T=3)
    ring = Ring(*make_ring(x), slots([0, 0], x))
    with pytest.raises(ValueError, match=r"ring.write: expected different pages, got page 0 twice"):
        decode("gdn", x, "torch", ring=ring)
    ring = ring._replace(write=slots([0, 1], x), read=slots([2, 1], x), counts=slots([0, 1], x))
    with pytest.raises(ValueError, match=r"ring.write: expected a page that row 1 does not read, got page 1"):
        decode("gdn", x, "torch", ring=ring)
    ring = ring._replace(read=slots([1, 2], x), counts=slots([1, 1], x))
    with pytest.raises(ValueError, match=r"ring.write: expected pages that no other row reads, got page 1"):
        decode("gdn", x, "torch", ring=ring)


def test_in_a_compiled_graph():
    x = make_call("gdn-raw", B=2)
    records, pages = make_ring(x), slots([0, 1], x)
    eager, rows = [t.clone() for t in (x["state_pool"], *records)], x["read_indices"]

    def step(pool, k, u, decay):
        o = decode("gdn-raw", x, None, state_pool=pool, ring=Ring(k, u, decay, write=pages))
        commit(pool, Ring(k, u, decay, read=pages, counts=rows + 1), rows, state_v_first=True)
        return o

    want = step(*eager)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x["state_pool"], *records), want)
    for t, same in zip((x["state_pool"], *records), eager, strict=True):
        assert torch.equal(t[:2, :3].nan_to_num(), same[:2, :3].nan_to_num())


SLOTS, REQUESTS, DRAFT = 14, 5, 4
STEPS, INTERPRETED = 10_000, 12  # in Triton's interpreter a call takes as long as hundreds


@dataclass
class Request:
    slot: int
    pages: list[int]  # to write next, and of the last draft
    count: int = 0  # of the last draft's tokens, those that were accepted and are not in the slot yet


class Engine:
    """Takes random steps on a pool with a ring. A second pool has the states after single tokens."""

    def __init__(self, kind, backend, seed):
        self.kind, self.backend, self.random = kind, backend, random.Random(seed)
        pool = torch.float32 if seed % 2 else torch.bfloat16
        self.x = make_call(kind, B=1, T=1, H=1, HV=2, K=8, V=8, slots=SLOTS, pool=pool, device=DEVICES[backend])
        self.pool, self.want = self.x["state_pool"], self.x["state_pool"].clone()
        self.records, self.free = make_ring(self.x, 2 * SLOTS, DRAFT), list(range(SLOTS))
        self.requests, self.taken = [], {}

    def step(self):
        steps = [self.admit] if len(self.requests) < REQUESTS else [self.evict]
        if self.requests:
            steps += [self.verify, self.verify, self.verify, self.commit, self.preempt]
        if self.requests and len(self.requests) < REQUESTS:
            steps.append(self.fork)
        step = self.random.choice(steps)
        step()
        self.taken[step.__name__] = self.taken.get(step.__name__, 0) + 1

    def some(self):
        return self.random.sample(self.requests, self.random.randint(1, len(self.requests)))

    def index(self, values):
        return slots(values, self.x)

    def admit(self):
        """A request in a free slot, whose state is whatever is in it."""
        slot = self.free.pop(self.random.randrange(len(self.free)))
        self.want[slot] = self.pool[slot]
        self.requests.append(Request(slot, [2 * slot, 2 * slot + 1]))
        return self.requests[-1]

    def evict(self):
        self.free.append(self.requests.pop(self.random.randrange(len(self.requests))).slot)

    def ring(self, requests, **more):
        read, counts = ([r.pages[1] for r in requests], [r.count for r in requests])
        return Ring(*self.records, read=self.index(read), counts=self.index(counts), **more)

    def verify(self):
        """A draft of some requests, and of padding; any number of its tokens is accepted, also none."""
        requests, T = self.some(), self.random.randint(1, DRAFT)
        seed, B = self.random.randrange(2**31), len(requests)
        x = make_call(self.kind, B + 1, T, 1, 2, 8, 8, slots=1, device=DEVICES[self.backend], seed=seed)
        x |= {name: self.x[name] for name in GATES if name in x}
        rows = self.index([*(r.slot for r in requests), -1])
        want = decode(self.kind, x, self.backend, state_pool=self.want, read_indices=rows)
        nobody = Request(-1, [-1, -1])
        ring = self.ring([*requests, nobody], write=self.index([*(r.pages[0] for r in requests), -1]))
        place = {"state_pool": self.pool, "read_indices": rows, "write_indices": rows}
        assert torch.equal(decode(self.kind, x, self.backend, ring=ring, **place), want)
        self.compare(requests)
        for b, request in enumerate(requests):
            request.pages.reverse()
            request.count = self.random.randint(0, T)
            row = {name: x[name][b : b + 1] for name in TOKENS if name in x}
            for t in range(request.count):
                decode(self.kind, at(x | row, t), self.backend, **self.single(request))

    def single(self, request):
        rows = self.index([request.slot])
        return {"state_pool": self.want, "read_indices": rows, "write_indices": rows}

    def compare(self, requests):
        """The states of requests without pending records."""
        rows = [r.slot for r in requests]
        assert torch.equal(self.pool[rows], self.want[rows])

    def commit(self, *checkpoints):
        requests = self.some()
        rows, ring = self.index([r.slot for r in requests]), self.ring(requests)
        commit(self.pool, ring, rows, state_v_first=True, backend=self.backend)
        for request in requests:
            request.count = 0
        self.compare(requests)

    def fork(self):
        """A new request goes on from the accepted tokens of another one, whose records are applied on the way."""
        other = self.random.choice(self.requests)
        new = self.admit()
        to, offsets = self.index([new.slot]), self.index([other.count])
        ring, rows = self.ring([other]), self.index([other.slot])
        commit(self.pool, ring, rows, to, offsets, state_v_first=True, backend=self.backend)
        self.want[new.slot], other.count = self.want[other.slot], 0
        self.compare([other, new])

    def preempt(self):
        """A request leaves its slot, comes back to another one, and its old slot gets other numbers."""
        request = self.random.choice(self.requests)
        commit(self.pool, self.ring([request]), self.index([request.slot]), state_v_first=True, backend=self.backend)
        kept = self.pool[request.slot].clone(), self.want[request.slot].clone()
        for pool in (self.pool, self.want):
            pool[request.slot] = 7
        self.free.append(request.slot)
        self.requests.remove(request)
        request.slot, request.count = self.free.pop(self.random.randrange(len(self.free))), 0
        request.pages = [2 * request.slot, 2 * request.slot + 1]
        self.pool[request.slot], self.want[request.slot] = kept
        self.requests.append(request)
        self.compare([request])


@backends
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
def test_random_engine(kind, seed, backend):
    engine = Engine(kind, backend, seed)
    interpreted = backend == "triton" and DEVICES[backend] == "cpu"
    for _ in range(INTERPRETED if interpreted else STEPS // 8 if backend == "torch" else 1_000 // 8):
        engine.step()
    assert interpreted or len(engine.taken) == 6
