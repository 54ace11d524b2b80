"""How long the segments of a sequence are, by what the kernels take on an H200 (docs/notes), in microseconds."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.segment_plan import ENDLESS, fastest_split, sequences_of, waves_us
from flash_delta.problem import Problem

SETUP = 8.0  # of a program until its first chunk, and after its last one
FACTOR = 1.0  # a chunk and head of a multiprocessor
COMPOSE = 1.9  # a segment
LAUNCHES = 8.0  # of three more kernels


class SegmentPace(NamedTuple):
    """What the width of heads decides."""

    whole: dict[int, float]  # a chunk of the loop that walks whole sequences, by its groups (tiles.py)
    map: float  # a chunk of half a map
    output: float  # a chunk of a walk with outputs
    worth: float  # the share of a whole walk's time that segments may take to be chosen


# Of 64 only the loop was measured: so they have to promise more.
PACES = {64: SegmentPace({1: 1.45}, 0.95, 1.3, 0.7), 128: SegmentPace({1: 1.73, 2: 2.8}, 1.25, 2.15, 0.9)}


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
        faded = max(1.0, left / processors) * (SETUP + length * pace.map)  # where one ends early another begins
        maps = (waves_us(halves, processors, SETUP, length, pace.map) + faded) / 2
        outputs = waves_us(states * number, processors, SETUP, length, pace.output)
        yield shared + maps + number * COMPOSE + outputs, C * length

    groups = 1 if width == 64 or 2 * states <= processors else 2
    whole = waves_us(states * width // (64 * groups), processors, SETUP, chunks, pace.whole[groups])
    shared = LAUNCHES + FACTOR * states * chunks / processors
    return fastest_split(chunks, pace.worth * whole, times)
