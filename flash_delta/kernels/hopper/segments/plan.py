"""How long the segments of a sequence are, by what the kernels take on an H200 (docs/notes), in microseconds."""

from functools import lru_cache
from math import inf
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.segment_plan import ENDLESS, sequences_of, splits, waves_us
from flash_delta.problem import Problem

COMPOSE = 1.9  # a segment
LAUNCHES = 8.0  # of three more kernels


class Lengths(NamedTuple):
    """Tokens of a segment in both passes; None where whole sequences are faster. If they are the same, the backward
    pass takes the forward pass's maps."""

    forward: int | None
    back: int | None


class Work(NamedTuple):
    """What is walked."""

    processors: int
    states: int  # heads of all sequences
    chunks: int  # of a sequence


class BackPace(NamedTuple):
    """Of the backward pass."""

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
    return _split(_work(p, processors), p.K)


def split_endless(p: Problem, processors: int) -> int | None:
    """Of one sequence without end. None where such calls are not split at any size: then nothing is compiled for it."""
    if p.batch_invariant or p.K not in PACES:
        return None
    return _split(Work(processors, p.HV, ENDLESS), p.K)


def split_prompt(p: Problem, processors: int) -> int | None:
    """The same on a pool, where one prompt that is alone may be split. Whether it leaves checkpoints, and where, does
    not matter: that may change no bit of a result."""
    return split_length(p, processors) if p.N == 1 else None


def split_training(p: Problem, processors: int) -> Lengths:
    """Of a call whose backward pass is by hand. Bits do not depend on lengths with ``batch_invariant``."""
    if p.batch_invariant or p.N == 0:
        return Lengths(None, None)
    return _split_training(_work(p, processors), p.K, split_endless(p, processors) is not None)


def _work(p: Problem, processors: int) -> Work:
    sequences, chunks = sequences_of(p)
    return Work(processors, sequences * p.HV, chunks)


@lru_cache(maxsize=1024)
def _split(work: Work, width: int) -> int | None:
    return _fastest(_forward_times(work, width))[0]


@lru_cache(maxsize=1024)
def _split_training(work: Work, width: int, may_split: bool) -> Lengths:
    """``may_split``: the forward pass."""
    forward = _forward_times(work, width) if may_split else {None: 0.0}
    back = _back_times(work, width)
    (before, forward_us), (after, back_us) = _fastest(forward), _fastest(back)
    together = {n: us + back[n] - _maps_us(work, width, n) for n, us in forward.items() if n is not None}
    both, us = _fastest(together)
    return Lengths(both, both) if us < forward_us + back_us else Lengths(before, after)


def _fastest(times: dict[int | None, float]) -> tuple[int | None, float]:
    return min(times.items(), key=lambda item: item[1], default=(None, inf))


def _forward_times(work: Work, width: int) -> dict[int | None, float]:
    """Of a walk in segments, by their tokens; of whole sequences at None."""
    pace, (processors, states, chunks) = PACES[width], work
    groups = 1 if width == 64 or 2 * states <= processors else 2
    whole = waves_us(states * width // (64 * groups), processors, pace.setup, chunks, pace.whole[groups])
    shared = LAUNCHES + pace.factor * states * chunks / processors
    times: dict[int | None, float] = {None: WORTH * whole}
    for number, length in splits(chunks):
        # Phi may fade (maps.py): the mean of no Phi that does, and of half of them.
        halves = states * (2 * number - 3)  # of maps: of the first segment one, of the last none
        left = halves - states * (number - 2) / 2
        faded = max(1.0, left / processors) * (pace.setup + length * pace.map)  # where one ends early another begins
        maps = (waves_us(halves, processors, pace.setup, length, pace.map) + faded) / 2
        outputs = waves_us(states * number, processors, pace.setup, length, pace.output)
        times.setdefault(C * length, shared + maps + number * COMPOSE + outputs)
    return times


def _back_times(work: Work, width: int) -> dict[int | None, float]:
    """The same of the backward pass, if it finds maps and the states in between again."""
    pace, (processors, states, chunks) = BACK[width], work

    def walks(states: int, chunks: int) -> float:
        return sum(waves_us(states, processors, pace.setup, chunks, us) for us in (pace.trace, pace.gradient))

    times: dict[int | None, float] = {None: WORTH * walks(states, chunks)}
    for number, length in splits(chunks):
        # As gates are when training begins, so many of these walks begin late or end early.
        ends = max(1.0, 0.75 * states * (number - 1) / processors) * (pace.setup + length * pace.end)
        found = LAUNCHES + ends + number * COMPOSE + _maps_us(work, width, C * length)
        times.setdefault(C * length, found + walks(states * number, length))
    return times


def _maps_us(work: Work, width: int, tokens: int) -> float:
    """Of what the backward pass need not find if the forward pass has left it."""
    pace, length = BACK[width], tokens // C
    number = -(-work.chunks // length)
    programs = 0.6 * work.states * (2 * number - 3) / work.processors
    return LAUNCHES + number * COMPOSE + max(1.0, programs) * (pace.setup + length * pace.map)
