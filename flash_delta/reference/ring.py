"""Records of drafts on the CPU: what tokens did to states, from which the states follow again."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import Inputs, KnownCall, Problem, Slots
from flash_delta.reference.slots import Use, is_slot, refuse_shared
from flash_delta.reference.step import Token, replay


class Pages(NamedTuple):
    """What the indices say about the records of a row."""

    write: int  # the page that it writes; -1 in a commit
    read: int  # the page whose records it applies,
    count: int  # and how many


def plan_pages(problem: Problem, s: Slots, rows: list[int]) -> dict[int, Pages]:
    """The pages of those rows that are not padding. Raises ValueError if rows share a page that is written."""
    pages, room = s.ring_k.shape[-4:-2]
    tables = s.ring_write, s.ring_read, s.ring_counts
    write, read, counts = (None if table is None else table.tolist() for table in tables)
    found = {}
    for b in rows:
        row = Pages(-1 if write is None else write[b], *((-1, 0) if read is None else (read[b], counts[b])))
        named = 0 <= row.read < pages if row.count else True
        if named and 0 <= row.count <= room and (write is None or 0 <= row.write < pages):
            found[b] = row
    for b, row in found.items():
        if row.count and row.read == row.write:
            raise ValueError(
                f"{problem.op}: ring.write: expected a page that row {b} does not read, got page {row.read}"
            )
    uses = [Use(b, row.read if row.count else None, [(row.write, "ring.write")]) for b, row in found.items()]
    refuse_shared(problem.op, uses if write is not None else [], "page")
    return found


class Ring:
    """The records of a layer, and the pages of its rows."""

    def __init__(self, problem: Problem, s: Slots, pages: dict[int, Pages]):
        self.problem, self.pages = problem, pages
        self.k, self.u, self.decay = s.ring_k, s.ring_u, s.ring_decay

    def store(self, b: int, t: int, token: Token, u: Tensor) -> None:
        """Stores the record of token t of a row. ``token``: that of this row alone."""
        page = self.pages[b].write
        self.k[page, t] = token.k[:: self.problem.HV // self.problem.H, 0]
        self.u[page, t] = u[:, 0]
        self.decay[page, t] = token.decay.reshape(self.decay.shape[2:])

    def applied(self, b: int, state: Tensor, count: int | None = None) -> Tensor:
        """The ``state [HV, K, V]`` of a row after its records, or after the first ``count`` of them. After each it is
        rounded to the state's dtype."""
        row, group = self.pages[b], self.problem.HV // self.problem.H
        for t in range(row.count if count is None else count):
            k = self.k[row.read, t].repeat_interleave(group, 0).unsqueeze(1)
            decay = self.decay[row.read, t].reshape(self.problem.HV, -1, 1)
            S = torch.empty_like(state, dtype=self.problem.accumulate)
            replay(state, decay, k, self.u[row.read, t].unsqueeze(1), S)
            state = S.to(state.dtype)
        return state


@torch.no_grad()
def commit(problem: Problem, x: Inputs, s: Slots, known: KnownCall | None = None) -> None:
    """Applies records to the states of all layers, in place. ``x``: k and u of the records, and as g their decays."""
    pool = s.state_pool.mT if problem.state_v_first else s.state_pool
    layer = s._replace(state_pool=s.state_pool[0])
    slots = s.read_indices.tolist()
    live = [b for b, slot in enumerate(slots) if is_slot(problem, layer, slot)]
    pages = plan_pages(problem, s._replace(ring_k=x.k), live)
    to, offsets = (None if of is None else of.tolist() for of in (s.checkpoint_indices, s.checkpoint_offsets))
    kept = {
        b: (to[b], offsets[b]) for b, row in pages.items()
        if to is not None and 0 <= offsets[b] <= row.count and is_slot(problem, layer, to[b])
    }  # fmt: skip
    changed = {b: [(slots[b], "slots")] if row.count else [] for b, row in pages.items()}
    left = {b: [(slot, "checkpoint_indices")] for b, (slot, _) in kept.items()}
    refuse_shared(problem.op, [Use(b, slots[b], changed[b] + left.get(b, [])) for b in pages])
    for states, *records in zip(pool, x.k, x.v, x.g, strict=True):
        ring = Ring(problem, s._replace(**dict(zip(("ring_k", "ring_u", "ring_decay"), records, strict=True))), pages)
        for b, row in pages.items():
            state = states[slots[b]]
            last = ring.applied(b, state)
            if b in kept:
                states[kept[b][0]] = ring.applied(b, state, kept[b][1])
            if row.count:
                states[slots[b]] = last
