"""How long the segments of a sequence are, by what the kernels take on an H200 (docs/notes), in microseconds."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.segment_plan import ENDLESS, fastest_split, sequences_of, waves_us
from flash_delta.problem import Problem

COMPOSE = 1.9  # a segment
LAUNCHES = 8.0  # of three more kernels


class BackPace(NamedTuple):
    """Of the backward pass, which finds maps and the states in between again."""

    setup: float  # of a program until its first chunk, and after its last one
    map: float  # a chunk of half a map
    trace: float  # a chunk of `run_retrace`
    end: float  # a chunk of `run_find_ends`
    gradient: float  # a chunk of `walk_back`


class SegmentPace(NamedTuple):
    """What the width of heads decides."""

    setup: float  # of a program until its first chunk, and after its last one
    factor: float  # a chunk and head of a multiprocessor
    whole: dict[int, float]  # a chunk of the loop that walks whole sequences, by its groups (tiles.py)
    map: float  # a chunk of half a map
    output: float  # a chunk of a walk with outputs


WORTH = 0.9  # the share of a whole walk's time that segments may take to be chosen
PACES = {
    64: SegmentPace(5.0, 0.7, {1: 1.4}, 0.6, 1.1),
    128: SegmentPace(8.0, 1.0, {1: 1.73, 2: 2.8}, 1.25, 2.15),
}

BACK = {64: BackPace(8.0, 0.6, 0.8, 1.2, 4.5), 128: BackPace(8.0, 1.25, 1.6, 2.2, 9.6)}


def split_length(p: Problem, processors: int) -> int | None:
    """Tokens of a segment; None where whole sequences are faster."""
    if p.N == 0 or split_endless(p, processors) is None:
        return None
    sequences, chunks = sequences_of(p)
    return _split(processors, sequences * p.HV, chunks, p.K)


def split_endless(p: Problem, processors: int) -> int | None:
    """Of one sequence without end. None where such calls are not split at any size: then nothing is compiled for it."""
    return None if p.batch_invariant or p.K not in PACES else _split(processors, p.HV, ENDLESS, p.K)


def split_prompt(p: Problem, processors: int) -> int | None:
    """The same on a pool, where one prompt that is alone may be split, unless it leaves checkpoints."""
    return split_length(p, processors) if p.N == 1 and may_split_prompt(p, processors) else None


def may_split_prompt(p: Problem, processors: int) -> bool:
    """Whether prompts of some length are."""
    return not p.checkpoint_every and split_endless(p, processors) is not None


@lru_cache(maxsize=1024)
def _split(processors: int, states: int, chunks: int, width: int) -> int | None:
    """``chunks`` of a sequence, ``states`` of all."""
    pace = PACES[width]

    def times(number: int, length: int) -> Iterator[tuple[float, int]]:
        # Phi may fade (maps.py): the mean of no Phi that does, and of half of them.
        halves = states * (2 * number - 3)  # of maps: of the first segment one, of the last none
        left = halves - states * (number - 2) / 2
        faded = max(1.0, left / processors) * (pace.setup + length * pace.map)  # where one ends early another begins
        maps = (waves_us(halves, processors, pace.setup, length, pace.map) + faded) / 2
        outputs = waves_us(states * number, processors, pace.setup, length, pace.output)
        yield shared + maps + number * COMPOSE + outputs, C * length

    groups = 1 if width == 64 or 2 * states <= processors else 2
    whole = waves_us(states * width // (64 * groups), processors, pace.setup, chunks, pace.whole[groups])
    shared = LAUNCHES + pace.factor * states * chunks / processors
    return fastest_split(chunks, WORTH * whole, times)


def split_back(p: Problem, processors: int) -> int | None:
    """Tokens of a segment in the backward pass; None where whole sequences are faster, and where bits must not depend
    on lengths."""
    if p.batch_invariant or p.N == 0:
        return None
    sequences, chunks = sequences_of(p)
    return _split_back(processors, sequences * p.HV, chunks, p.K)


@lru_cache(maxsize=1024)
def _split_back(processors: int, states: int, chunks: int, width: int) -> int | None:
    pace = BACK[width]

    def walks(states: int, chunks: int) -> float:
        return sum(waves_us(states, processors, pace.setup, chunks, us) for us in (pace.trace, pace.gradient))

    def times(number: int, length: int) -> Iterator[tuple[float, int]]:
        # As gates are when training begins, so many of these walks begin late or end early.
        maps = max(1.0, 0.6 * states * (2 * number - 3) / processors) * (pace.setup + length * pace.map)
        ends = max(1.0, 0.75 * states * (number - 1) / processors) * (pace.setup + length * pace.end)
        yield 2 * LAUNCHES + maps + ends + 2 * number * COMPOSE + walks(states * number, length), C * length

    return fastest_split(chunks, WORTH * walks(states, chunks), times)
