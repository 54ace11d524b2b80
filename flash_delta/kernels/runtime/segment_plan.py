"""How sequences are split into segments: the search for the number of segments whose launches take least.

A backend hands in what its launches take, by a model: programs run in waves of as many as fit the chip, and a
wave takes a set-up time and a time for each of its chunks. All times are in microseconds.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flash_delta.kernels.device.chunk import C
from flash_delta.problem import Problem

MOST, FEWEST = 64, 8  # segments of a sequence; chunks of a segment
ENDLESS = 2**14  # chunks


def waves_us(programs: int, together: int, setup: float, chunks: int, chunk: float) -> float:
    """What ``programs`` take that walk so many ``chunks`` each; ``together`` of them run at once."""
    return -(-programs // together) * (setup + chunks * chunk)


def fastest_split(chunks: int, limit: float, times: Callable[[int, int], Iterable[tuple[float, Any]]]) -> Any:
    """The split of a sequence of ``chunks`` that takes least; None if none takes less than ``limit``.

    ``times(number, length)`` gives what so many segments of ``length`` chunks take, with the split, for each choice of
    tiles.
    """
    best, fastest = limit, None
    for number, length in splits(chunks):
        for us, split in times(number, length):
            if us < best:
                best, fastest = us, split
    return fastest


def splits(chunks: int) -> Iterator[tuple[int, int]]:
    """Into how many segments a sequence of ``chunks`` may be split, and the chunks of each."""
    for number in range(2, min(MOST, chunks // FEWEST) + 1):
        yield number, -(-chunks // number)


def sequences_of(p: Problem) -> tuple[int, int]:
    """How many sequences a plan counts with, and the chunks of each.

    All have one length there. Where the host knows the lengths it is the longest one's, and there are as many as make
    the same number of tokens: a long sequence beside short ones is split as if it were alone.
    """
    if not p.packed:
        return p.N, -(-p.T // C)
    if p.lengths is None:
        return p.N, -(-p.T // (C * p.N))
    longest = max(p.lengths, default=0)
    return (round(sum(p.lengths) / longest), _coarse(-(-longest // C))) if longest else (p.N, 0)


def _coarse(chunks: int) -> int:
    """Up to 3 % more: what is launched is remembered for every plan, and lengths change with every batch."""
    step = 1 << max(0, chunks.bit_length() - 6)
    return -(-chunks // step) * step
