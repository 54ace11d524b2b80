"""Serving on the CPU: the recurrence on the slots of a pool, one token of all rows at a time.

States are updated row by row, in their slots if possible. So a state stays in the cache from its decay to its output.
If all rows were updated together, each state would be read from memory four times. Rows do not affect each other, and
padding is skipped.
"""

from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import Around, Inputs, KnownCall, Problem, Slots
from flash_delta.reference.around import convolve, normalize
from flash_delta.reference.ring import Ring, plan_pages
from flash_delta.reference.slots import Use, is_slot, refuse_shared, slots_read
from flash_delta.reference.step import Token, activated, read, write
from flash_delta.reference.tokens import PER_TOKEN

ALIGNMENT = 64  # of new tensors, in bytes


class Row(NamedTuple):
    """What the indices say about a row that is not padding."""

    read: int  # the slot of its state
    column: int  # the column of this slot in the table
    window: int  # the slot of its window
    parents: dict[int, int]  # for each token that is not padding, the token that it continues; -1: the row
    writes: dict[int, int]  # the slots that tokens write


@torch.no_grad()
def decode(problem: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o [B, T, HV, V]``, or ``[1, total, HV, V]`` for packed rows. The pools are written in place."""
    most = problem.pools.most_tokens
    lengths = [n if n <= most else 0 for n in problem.lengths] if problem.packed else [problem.T] * problem.B
    rows, ring = plan_rows(problem, s, lengths), None  # a refusal comes before anything is written
    if s.ring_k is not None:
        pages = plan_pages(problem, s, [*rows])
        rows, ring = {b: rows[b] for b in pages}, Ring(problem, s, pages)
    o = zeros_of(problem, s)
    if rows:
        (decode_packed if problem.packed else decode_rows)(problem, x, s, around, o, rows, ring)
    return o


def decode_packed(
    problem: Problem, x: Inputs, s: Slots, around: Around, o: Tensor, rows: dict[int, Row], ring: Ring | None
) -> None:  # fmt: skip
    """Runs packed rows as rows of equal length, whose last tokens are padding."""
    starts, T = [0, *accumulate(problem.lengths)][:-1], max(problem.lengths[b] for b in rows)
    first, step = (torch.tensor(of, device=problem.device) for of in (starts, range(T)))
    at = (first[:, None] + step).clamp(max=problem.T - 1)  # [N, T]

    def by_rows(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[0, at]

    x = x._replace(**{name: by_rows(getattr(x, name)) for name in PER_TOKEN})
    around = around._replace(norm_gate=by_rows(around.norm_gate))
    padded = problem._replace(B=problem.N, T=T, packed=False)
    out = o.new_zeros(problem.N, T, problem.HV, problem.V)
    decode_rows(padded, x, s, around, out, rows, ring)
    for b in rows:
        length = problem.lengths[b]
        o[0, starts[b] : starts[b] + length] = out[b, :length]


def decode_rows(
    problem: Problem, x: Inputs, s: Slots, around: Around, o: Tensor, rows: dict[int, Row], ring: Ring | None
) -> None:  # fmt: skip
    """Runs rows and writes to ``o``, which holds zeros."""
    states = States(problem, s, rows) if ring is None else StatesOfRecords(problem, s, rows, ring)
    windows = None if around.conv_pool is None else Windows(problem, s, around, rows)
    for t in range(problem.T):
        live = {b: row for b, row in rows.items() if t in row.parents}
        if not live:
            continue
        heads = by_row(problem, activated(problem, *((x, t) if windows is None else windows.convolved(x, t, live))))
        out = o[:, t] if around.norm_gate is None else torch.zeros_like(o[:, t], dtype=problem.accumulate)  # [B, HV, V]
        for b, row in live.items():
            before, S = states.around(b, row, t)
            u = write(problem, heads[b], before, S)
            out[b] = read(problem, heads[b], S).squeeze(1)
            states.keep(b, row, t, S)
            if ring is not None:
                ring.store(b, t, heads[b], u)
        if around.norm_gate is not None:
            o[list(live), t] = normalize(problem, out, around.norm_gate[:, t], around)[list(live)].to(o.dtype)


def zeros_of(problem: Problem, s: Slots) -> Tensor:
    """Zeros for a serving call's output."""
    if s.out is not None:
        return s.out.zero_()
    return torch.zeros(problem.B, problem.T, problem.HV, problem.V, dtype=problem.dtype, device=problem.device)


def written(s: Slots) -> Tensor:
    """The pool where states are written."""
    return s.state_pool if s.write_pool is None else s.write_pool


def plan_rows(problem: Problem, s: Slots, lengths: list[int]) -> dict[int, Row]:
    """The rows that are not padding."""
    rows, target = {}, written(s)
    each = target.dim() == 5
    parents, write = (None if of is None else of.tolist() for of in (s.parent_idx, s.write_indices))
    per_token = write is not None and s.write_indices.dim() == 2
    for b, ((table, column), T) in enumerate(zip(slots_read(s), lengths, strict=True)):
        read = table[column]
        row = Row(read, column, table[0] if problem.pools.rolling else read, {}, {})
        for t in range(T if is_slot(problem, s, read) and is_slot(problem, s, row.window) else 0):
            parent = t - 1 if parents is None or t == 0 else parents[b][t]
            slot = None if write is None else write[b][t] if per_token else write[b]
            if parent not in (-1, *row.parents) or (slot is not None and not is_slot(problem, s, slot, target)):
                continue
            row.parents[t] = parent
            if slot is not None and (per_token or each or t + 1 == T):
                row.writes[t] = slot
        if row.parents:
            rows[b] = row
    # In a pool of rows every token has a place of its own, so a row is written once.
    slots = {b: list(row.writes.values())[: 1 if each else None] for b, row in rows.items()}
    uses = [
        Use(b, row.read if s.write_pool is None else None, [(slot, "write_indices") for slot in slots[b]])
        for b, row in rows.items()
    ]
    refuse_shared(problem.op, uses)
    if problem.pools.rolling and (
        write is not None or s.ring_k is not None
    ):  # a row has one window, in the first of the slots that it may read
        refuse_shared(problem.op, [Use(b, None, [(row.window, "read_indices")]) for b, row in rows.items()])
    return rows


def by_row(problem: Problem, token: Token) -> list[Token]:
    """Splits a token into one token per row, each a batch of value heads."""
    if problem.B == 1:
        return [token]
    parts = ([None] * problem.B if y is None else y.view(problem.B, problem.HV, *y.shape[1:]).unbind(0) for y in token)
    return [Token(*row) for row in zip(*parts, strict=True)]


class States:
    """The states ``[HV, K, V]`` that the tokens of each row continue from."""

    def __init__(self, problem: Problem, s: Slots, rows: dict[int, Row]):
        self.pool = written(s)
        self.tree, self.dtype, self.v_first = s.parent_idx is not None, problem.accumulate, problem.state_v_first
        slots = self.slots(s.state_pool)
        # By the token that left the state; -1: the row's. For trees that is a copy, since a token may overwrite it
        # before another token reads it.
        self.after = {b: {-1: slots[row.read].clone() if self.tree else slots[row.read]} for b, row in rows.items()}
        # If a slot has the layout and alignment of a new tensor, products with it are rounded in the same way.
        apart = gcd(*self.pool.stride()[:-3]) * self.pool.itemsize
        aligned = (self.pool.data_ptr() | apart) % ALIGNMENT == 0
        self.in_place = self.pool.dtype == self.dtype and aligned and self.pool[:1].flatten(0, -4)[0].is_contiguous()

    def slots(self, pool: Tensor) -> Tensor:
        return pool.mT if self.v_first else pool

    def around(self, b: int, row: Row, t: int) -> tuple[Tensor, Tensor]:
        """The state before token t, and the tensor in which the state after it is computed."""
        if self.in_place and t in row.writes:
            return self.after[b][row.parents[t]], self.slots(place(self.pool, row.writes[t], t, 3))
        new = torch.empty(self.pool.shape[-3:], dtype=self.dtype, device=self.pool.device)
        return self.after[b][row.parents[t]], self.slots(new)

    def keep(self, b: int, row: Row, t: int, S: Tensor) -> None:
        """Keeps the rounded state after token t for tokens that continue from it, and writes it to the token's slot."""
        S = S.to(self.pool.dtype)
        self.after[b] = (self.after[b] if self.tree else {}) | {t: S}
        if t in row.writes and not self.in_place:
            self.slots(place(self.pool, row.writes[t], t, 3))[:] = S


class StatesOfRecords(States):
    """States that only records lead to: a row's first one comes from the records that it reads, and none after a token
    is written."""

    def __init__(self, problem: Problem, s: Slots, rows: dict[int, Row], ring: Ring):
        super().__init__(problem, s, rows)
        for b, row in rows.items():
            state = ring.applied(b, self.after[b][-1])
            self.after[b] = {-1: state}
            for slot in row.writes.values():
                self.slots(self.pool)[slot] = state
            row.writes.clear()


def place(pool: Tensor, slot: int, t: int, axes: int) -> Tensor:
    """The place of token t's state or window in a pool. ``axes``: how many axes the state or window has."""
    return pool[slot] if pool.dim() == axes + 1 else pool[slot, t]


class Windows:
    """The last inputs of the short convolution, ``[B, D, L]`` for all rows. Padding rows have arbitrary ones."""

    def __init__(self, problem: Problem, s: Slots, around: Around, rows: dict[int, Row]):
        self.problem, self.around = problem, around
        self.written = s.write_indices is not None or s.ring_k is not None
        found = [(rows[b].window, rows[b].column) if b in rows else (0, 0) for b in range(problem.B)]
        first = around.conv_pool[[slot for slot, _ in found]]
        if problem.pools.rolling:
            places = enumerate(column for _, column in found)
            first = torch.stack([first[b, :, column : column + problem.pools.window] for b, column in places])
        self.after = {-1: first}  # by the token that left the windows; -1: those of the rows

    def convolved(self, x: Inputs, t: int, live: dict[int, Row]) -> tuple[Inputs, int]:
        """Token t after the convolution, and its place among the returned tokens. Writes the windows of token t."""
        parents = [live[b].parents[t] if b in live else -1 for b in range(self.problem.B)]
        before = torch.stack([self.after[parent][b] for b, parent in enumerate(parents)])
        token, window = convolve(self.problem, x, t, before, self.around)
        self.after[t] = window
        pool = self.around.conv_pool if self.around.conv_write_pool is None else self.around.conv_write_pool
        for b, row in live.items():
            if self.problem.pools.rolling and self.written:
                pool[row.window, :, t : t + self.problem.pools.window] = window[b]
            elif t in row.writes and not self.problem.pools.rolling:
                place(pool, row.writes[t], t, 2)[:] = window[b]
        return token, 0
