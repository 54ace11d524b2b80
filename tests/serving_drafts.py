"""What decoding calls of an engine may have beside a pool: packed rows, a pool to write, rolling windows."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from serving_pool import IS_SLOT, SLOTS

from flash_delta.ops._check.serving import MOST_TOKENS
from flash_delta.ops.serving import Convolution
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
    """A pool that a call writes instead, in slots or in rows; nobody else has it."""

    def __init__(self, pool, rows, T, writes):
        self.pool, self.of_rows = pool, writes == "each" and pool.random.random() < 0.5
        count, places = len(rows), (T + 1,) if self.of_rows else ()
        shape = (1 + (count if self.of_rows else count * T), *places, *pool.slots.shape[1:])
        self.slots = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
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

    def at(self, n, t):
        place = self.places[n][t]
        return self.states[place, t] if self.of_rows else self.states[place]

    def judge(self, kept):
        found = [(self.at(n, t), S) for n, states in enumerate(kept) for t, S in states.items()]
        if found:
            got, want = (torch.stack(of) for of in zip(*found, strict=True))
            assert_accurate("write_pool", got, want, got.dtype)
        assert int((~self.slots.isnan()).sum()) == sum(got.numel() for got, _ in found), "write_pool"

    def accept(self, n, row, t, want):
        """The engine copies a state to where the request has its states."""
        self.pool.states[row.writes[t]] = self.at(n, t)
        self.pool.want[row.writes[t]] = want


class Windows:
    """A rolling slot for each row, with gaps, filled for this call; the others are nobody's, and NaN."""

    W = 3

    def __init__(self, pool, rows, x):
        D = sum(x[name][0, 0].numel() for name in ("q", "k", "v"))
        L = self.W - 2 + max(MOST_TOKENS, DRAFT)
        self.memory = torch.full((SLOTS, D + 1, L + 1), float("nan"), device=pool.device)
        read, counts = x["read_indices"].reshape(len(rows), -1).tolist(), x.get("num_accepted_tokens")
        counts = [1] * len(rows) if counts is None else counts.tolist()
        self.found = []
        for row, table, count in zip(rows, read, counts, strict=True):
            if row.request is not None and table[0] not in IS_SLOT:  # its state is in another column
                table[0] = row.request.table[0]
            self.found.append((table[0], count) if row.request is not None else None)
        if "num_accepted_tokens" in x:
            x["read_indices"] = pool.index("read_indices", read)
        gen = torch.Generator().manual_seed(pool.calls)
        for place in self.found:
            if place is not None:
                self.memory[place[0], 1:, 1:] = torch.randn(D, L, generator=gen).to(pool.device)
        self.before = self.memory.clone()
        self.weight = torch.randn(D, self.W, generator=gen).to(pool.device)
        self.convolution = Convolution(self.memory[:, 1:, 1:], self.weight, rolling=True)
        self.inputs = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], 2)

    def convolved(self, x):
        """q, k and v of the rule, in float64."""
        y = torch.zeros_like(self.inputs, dtype=torch.float64)
        for b, place in enumerate(self.found):
            if place is not None:
                slot, a = place
                first = self.before[slot, 1:, a : a + self.W - 1]
                row = torch.cat([first, self.inputs[b].mT.to(first.dtype)], 1).double()
                y[b] = (row.unfold(1, self.W, 1) * self.weight.double()[:, None]).sum(2).mT
        sizes = [x[name][0, 0].numel() for name in ("q", "k", "v")]
        parts = zip(("q", "k", "v"), F.silu(y).split(sizes, 2), strict=True)
        return x | {name: part.view(x[name].shape) for name, part in parts}

    def judge(self, rows, after, written):
        want = self.before.clone()
        for b, (row, states) in enumerate(zip(rows, after, strict=True)):
            if row.request is not None and states and written:
                slot, a = self.found[b]
                new = self.inputs[b, : len(states)].mT.to(want.dtype)
                kept = torch.cat([self.before[slot, 1:, 1 + a : a + self.W - 1], new], 1)
                want[slot, 1:, 1 : 1 + kept.shape[1]] = kept
        assert torch.equal(want.view(torch.int32), self.memory.view(torch.int32)), "windows"
