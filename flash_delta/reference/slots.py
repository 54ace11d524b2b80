"""Which slots the rows of a serving call read and write, on the CPU."""

from typing import NamedTuple

from torch import Tensor

from flash_delta.problem import Problem, Slots


def is_slot(problem: Problem, s: Slots, index: int | Tensor, pool: Tensor | None = None) -> bool | Tensor:
    """Whether ``index`` is a slot of ``pool``, or of the pool that is read if ``pool`` is None."""
    slots = len(s.state_pool if pool is None else pool)
    return (index >= 0) & (index < slots) & (index != problem.pools.null_slot)


class Use(NamedTuple):
    """The slots of the written pool that a row or a sequence uses, or the pages of a ring."""

    row: int
    read: int | None
    written: list[tuple[int, str]]  # each with the argument that names it


def refuse_shared(op: str, uses: list[Use], what: str = "slot") -> None:
    """Raises ValueError if a slot is written twice, or written by one row and read by another."""
    owners: dict[int, tuple[int, str]] = {}
    for use in uses:
        for slot, name in use.written:
            if slot in owners:
                raise ValueError(f"{op}: {name}: expected different {what}s, got {what} {slot} twice")
            owners[slot] = use.row, name
    for use in uses:
        row, name = owners.get(use.read, (use.row, ""))
        if row != use.row:
            got = f"{what} {use.read}, which row {use.row} reads and row {row} writes"
            raise ValueError(f"{op}: {name}: expected {what}s that no other row reads, got {got}")


def slots_read(s: Slots) -> list[tuple[list[int], int]]:
    """Returns for every row its slots, and the column of the slot that it reads. If the count is out of range, the slot
    is -1. With a ring a row has one slot, and the column is that of its window."""
    read = s.read_indices.tolist()
    if s.num_accepted_tokens is None:
        return [([slot], 0) for slot in read]
    if s.ring_k is not None:
        read = [[slot] * s.ring_k.shape[1] for slot in read]
    counts = s.num_accepted_tokens.tolist()
    return [(row, n - 1) if 0 < n <= len(row) else ([-1], 0) for row, n in zip(read, counts, strict=True)]
