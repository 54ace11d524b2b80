"""What calls of an engine may have beside a pool: packed rows, a pool to write, windows of a convolution."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from serving_pool import IS_SLOT
from serving_truth import bits

from flash_delta.ops._check.serving import MOST_TOKENS
from flash_delta.testing import assert_accurate

DRAFT = 4  # tokens, and slots of a request for the states after each
INPUTS = ("q", "k", "v", "g", "beta")


def packed(op, x, rows, backend, wide):
    """The call with packed rows, and its output as that of rows of one length. With a table (``wide``) a row of padding
    may have more tokens than that has columns."""
    T, device = x["v"].shape[1], x["v"].device
    lengths = [T + 1 if wide and row.request is None and row.length == T else row.length for row in rows]
    at = [(b, min(t, T - 1)) for b, length in enumerate(lengths) for t in range(length)] + [(0, 0)] * 2
    b, t = torch.tensor(at, device=device).T
    call = x | {name: x[name][b, t].unsqueeze(0) for name in INPUTS}
    if "output_norm" in x:
        call["output_norm"] = x["output_norm"]._replace(gate=x["output_norm"].gate[b, t].unsqueeze(0))
    if "out" in x:
        call["out"] = torch.full_like(call["v"], float("nan"))
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    flat, o = op(**call, cu_seqlens=bounds, backend=backend)[0], torch.zeros_like(x["v"])
    assert not flat[bounds[-1] :].any()
    for b, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        assert length <= T or not flat[start : start + length].any()
        o[b, : min(length, T)] = flat[start : start + min(length, T)]
    return o


class Scratch:
    """Pools that a call writes instead, in slots or in rows; nobody else has them."""

    def __init__(self, pool, rows, T, writes):
        self.pool, self.of_rows = pool, writes == "each" and pool.random.random() < 0.5
        count, places = len(rows), (T + 1,) if self.of_rows else ()
        self.slots, self.windows = (
            of.new_full((1 + (count if self.of_rows else count * T), *places, *of.shape[1:]), float("nan"))
            for of in (pool.slots, pool.windows)
        )
        self.states = self.slots.mT if pool.v_first else self.slots
        for row in rows if self.of_rows else ():  # it has a place for every token
            if row.request is not None:
                row.writes = row.request.table[:T]
        self.places = [[1 + (n if self.of_rows else n * T + t) for t in range(T)] for n in range(count)]  # 0 is NULL
        indices = [
            [place if slot in IS_SLOT else -1 for place, slot in zip(at, row.writes, strict=True)]
            for at, row in zip(self.places, rows, strict=True)
        ]
        if writes == "last":
            self.places = [[at[-1]] * T for at in self.places]
        self.indices = indices if writes == "each" and not self.of_rows else [row[-1] for row in indices]

    def at(self, of, n, t):
        place = self.places[n][t]
        return of[place, t] if self.of_rows else of[place]

    def judge(self, kept, windows):
        """``windows``: of every row by its tokens; None where the call writes them nowhere else."""
        found = [(self.at(self.states, n, t), S) for n, states in enumerate(kept) for t, S in states.items()]
        if found:
            got, want = (torch.stack(of) for of in zip(*found, strict=True))
            assert_accurate("write_pool", got, want, got.dtype)
        assert int((~self.slots.isnan()).sum()) == sum(got.numel() for got, _ in found), "write_pool"
        left = torch.full_like(self.windows, float("nan"))
        for n, states in enumerate(kept if windows is not None else ()):
            for t in states:
                self.at(left, n, t).copy_(windows[n][t])
        assert torch.equal(bits(left), bits(self.windows)), "convolution.write_pool"

    def accept(self, n, row, t, want):
        """The engine copies a state to where the request has its states."""
        self.pool.states[row.writes[t]] = self.at(self.states, n, t)
        self.pool.want[row.writes[t]] = want


class Rolling:
    """A rolling slot for each row, with gaps, made for this call from the rows' windows; the others are nobody's, and
    NaN."""

    def __init__(self, pool, rows, x):
        self.W, (slots, D, inputs) = pool.W, pool.windows.shape
        shape = slots, D + 1, self.W - 1 + max(MOST_TOKENS, DRAFT)
        self.memory = pool.windows.new_full(shape, float("nan"))
        read, counts = x["read_indices"].reshape(len(rows), -1).tolist(), x.get("num_accepted_tokens")
        counts = [1] * len(rows) if counts is None else counts.tolist()
        self.found = []
        for row, table, count in zip(rows, read, counts, strict=True):
            if row.request is not None and table[0] not in IS_SLOT:  # its state is in another column
                table[0] = row.request.table[0]
            self.found.append((table[0], count) if row.request is not None else None)
        if "num_accepted_tokens" in x:
            x["read_indices"] = pool.index("read_indices", read)
        for row, place in zip(rows, self.found, strict=True):
            if place is not None:
                slot, a = place
                self.memory[slot, 1:, 1:] = pool.randn((D, shape[2] - 1))[0]
                self.memory[slot, 1:, a : a + inputs] = pool.windows[row.read]
        self.before = self.memory.clone()
        self.convolution = pool.convolution._replace(pool=self.memory[:, 1:, 1:], rolling=True)

    def judge(self, inputs, live, written):
        """``inputs``: of all tokens ``[B, T, D]``; ``live``: of each row those that are no padding."""
        want = self.before.clone()
        for b, tokens in enumerate(live if written else ()):
            if tokens:
                slot, a = self.found[b]
                new = inputs[b, : len(tokens)].mT.to(want)
                kept = torch.cat([self.before[slot, 1:, 1 + a : a + self.W - 1], new], 1)
                want[slot, 1:, 1 : 1 + kept.shape[1]] = kept
        assert torch.equal(bits(want), bits(self.memory)), "rolling windows"


def convolved_rows(pool, x, rows, live):
    """q, k and v of all tokens in float64, the window after each that is no padding, and the inputs ``[B, T, D]``."""
    inputs = torch.cat([x[name].flatten(2) for name in "qkv"], 2).cpu().to(pool.around)
    weight, bias = (t.double().cpu() for t in pool.convolution[1:3])
    y, after = torch.zeros_like(inputs, dtype=torch.float64), [{} for _ in rows]
    for b, row in enumerate(rows):
        before = pool.windows[row.read].cpu() if live[b] else None
        for t, parent in live[b].items():
            seen = torch.cat([after[b].get(parent, before), inputs[b, t, :, None]], 1)  # [D, W]
            y[b, t], after[b][t] = (seen.double() * weight).sum(1) + bias, seen[:, 1:]
    return in_heads(x, y), after, inputs


def in_heads(x, y):
    """q, k and v in place of those of the call."""
    parts = F.silu(y).split([x[name][0, 0].numel() for name in "qkv"], 2)
    return x | {name: part.view(x[name].shape) for name, part in zip("qkv", parts, strict=True)}
