"""Decides into how many segments sequences are split: the number with the least time.

A backend gives the time of its launches by a model. In this model, as many programs as fit the chip run as one wave. A
wave takes a set-up time, and a time for each chunk of a program. All times are in microseconds.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flash_delta.kernels.device.chunk import C
from flash_delta.problem import Problem

MOST, FEWEST = 64, 8  # most segments of a sequence; fewest chunks of a segment
ENDLESS = 2**14  # chunks


def waves_us(programs: int, together: int, setup: float, chunks: int, chunk: float) -> float:
    """The time of ``programs`` with ``chunks`` each, ``together`` of them at once. ``chunk``: the time of a chunk."""
    return -(-programs // together) * (setup + chunks * chunk)


def fastest_split(chunks: int, limit: float, times: Callable[[int, int], Iterable[tuple[float, Any]]]) -> Any:
    """The fastest split of a sequence of ``chunks``, or None if none takes less than ``limit``.

    ``times(number, length)`` yields, for each choice of tiles, the time of ``number`` segments of ``length`` chunks,
    and the split.
    """
    best, fastest = limit, None
    for number, length in splits(chunks):
        for us, split in times(number, length):
            if us < best:
                best, fastest = us, split
    return fastest


def splits(chunks: int) -> Iterator[tuple[int, int]]:
    """The numbers of segments that a sequence of ``chunks`` may have, each with the chunks of a segment."""
    for number in range(2, min(MOST, chunks // FEWEST) + 1):
        yield number, -(-chunks // number)


def sequences_of(p: Problem) -> tuple[int, int]:
    """The number of sequences that a plan assumes, and the chunks of each.

    A plan assumes sequences of equal length. If the host knows the lengths, it is that of the longest one, and the
    number of sequences keeps the total number of tokens. So a long sequence beside short ones is split as if alone.
    """
    if not p.packed:
        return p.N, -(-p.T // C)
    if p.lengths is None:
        return p.N, -(-p.T // (C * p.N))
    longest = max(p.lengths, default=0)
    return (round(sum(p.lengths) / longest), _coarse(-(-longest // C))) if longest else (p.N, 0)


def _coarse(chunks: int) -> int:
    """``chunks`` rounded up, by at most 3 %, so that there are few plans. Launches are remembered for each plan, and
    lengths change with every batch."""
    step = 1 << max(0, chunks.bit_length() - 6)
    return -(-chunks // step) * step
