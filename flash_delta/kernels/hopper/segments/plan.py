"""Decides how long the segments of a sequence are, from the kernels' times on an H200 (docs/notes), in microseconds."""

from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS
from flash_delta.kernels.runtime.pool_launches import prompts_at_most
from flash_delta.kernels.runtime.segment_plan import ENDLESS, FEWEST, sequences_of, splits, waves_us
from flash_delta.problem import Problem

COMPOSE = 1.9  # per segment
LAUNCHES = 8.0  # for launching three more kernels


GAIN = 1.5  # a prompt on a pool is cut if this makes it so much faster where it is alone
MOST_PARTS = 16
LONGEST = 2048  # chunks; prompts are never cut if this only pays for longer ones


class Cut(NamedTuple):
    """How prompts on a pool are cut into parts. Only the heads and the chip decide about these numbers, and then only
    its own length about a prompt. So no other prompt changes a bit of it."""

    shortest: int  # a prompt of fewer whole chunks is not cut
    fewest: int  # whole chunks of a prompt for each of its parts
    most: int  # parts of a prompt


class CutPace(NamedTuple):
    """The time of a call with one prompt on a pool. It is call + chunk * chunks if the prompt is whole, and start +
    part_chunk * chunks in parts. The numbers with ``share`` are added to those before them, times the share of the
    multiprocessors that the prompt's heads take."""

    call: float
    chunk: float
    start: float
    start_share: float
    part_chunk: float
    part_share: float


# Fitted to 4 to 32 heads of 128, and 8,192 and 32,768 tokens, within 8 us. Heads of 64 by the other times of this file.
CUTS = {64: CutPace(20, 1.5, 50, 230, 0.16, 1.8), 128: CutPace(20, 1.9, 50, 383, 0.16, 3.23)}


class Lengths(NamedTuple):
    """Tokens of a segment in both passes. None if whole sequences are faster. If both are equal, the backward pass uses
    the forward pass's maps."""

    forward: int | None
    back: int | None


class Work(NamedTuple):
    """The sizes of a walk."""

    processors: int
    states: int  # heads of all sequences
    chunks: int  # of a sequence


class BackPace(NamedTuple):
    """Times of the backward pass."""

    setup: float  # of a program, before its first chunk and after its last one
    map: float  # per chunk of half a map
    trace: float  # per chunk of `run_retrace`
    end: float  # per chunk of `run_find_ends`
    gradient: float  # per chunk of `walk_back`


class SegmentPace(NamedTuple):
    """Times that depend on the width of heads."""

    setup: float  # of a program, before its first chunk and after its last one
    factor: float  # per chunk and head, on one multiprocessor
    whole: dict[int, float]  # per chunk of the loop for whole sequences, by its groups (tiles.py)
    map: float  # per chunk of half a map
    output: float  # per chunk of a walk with outputs


WORTH = 0.9  # segments are chosen if they take at most this share of a whole walk's time
PACES = {
    64: SegmentPace(5.0, 0.7, {1: 1.4}, 0.6, 1.1),
    128: SegmentPace(8.0, 1.0, {1: 1.73, 2: 2.8}, 1.25, 2.15),
}

BACK = {64: BackPace(8.0, 0.6, 0.8, 1.2, 4.5), 128: BackPace(8.0, 1.25, 1.6, 2.2, 9.6)}


def split_length(p: Problem, processors: int) -> int | None:
    """Tokens of a segment, or None if whole sequences are faster."""
    if not 0 < p.N <= MOST_PROGRAMS or split_endless(p, processors) is None:  # `compose_maps` has a program for each
        return None
    return _split(_work(p, processors), p.K)


def split_endless(p: Problem, processors: int) -> int | None:
    """The length for one endless sequence. None if such calls are never split. Then nothing is compiled for splits."""
    if p.batch_invariant or p.K not in PACES:
        return None
    return _split(Work(processors, p.HV, ENDLESS), p.K)


def cut_prompts(p: Problem, processors: int) -> Cut | None:
    """How prompts are cut on a pool. None if no prompt of such heads is."""
    return _cut(p.HV, p.K, processors)


def _cut(HV: int, width: int, processors: int) -> Cut | None:
    pace, share = CUTS[width], HV / processors
    gained = pace.chunk - GAIN * (pace.part_chunk + pace.part_share * share)  # per chunk
    lost = GAIN * (pace.start + pace.start_share * share) - pace.call
    most = min(MOST_PARTS, processors // HV)
    if most < 2 or gained * LONGEST < lost:
        return None
    fewest = (
        FEWEST if 2 * HV * most <= processors else 2 * FEWEST
    )  # if halves of states run at once, parts may be short
    return Cut(max(2 * fewest, ceil(lost / gained)), fewest, most)


def part_length(tokens: int, cut: Cut) -> int:
    """The chunks of a prompt's parts. The last part may have fewer. The device computes the same (`cut_prompt` in
    forward/prompt_list.py, `part_length` in bounds.py)."""
    whole, chunks = tokens // C, -(-tokens // C)
    return -(-chunks // (min(whole // cut.fewest, cut.most) if whole >= cut.shortest else 1))


def count_starts(p: Problem, cut: Cut) -> tuple[int, int]:
    """How many parts there can be in one call, and of how many prompts. If there are more prompts than the caller has
    promised, the number of parts may not suffice for them. Then some prompts are not cut."""
    bound, promised = prompts_at_most(p)
    chunks, prompts = p.T // C, bound if promised is None else min(bound, promised)
    by_length = chunks * cut.most // max(cut.shortest, cut.fewest * cut.most)
    starts = min(by_length, cut.most * min(prompts, chunks // cut.shortest), 2 * MOST_PROGRAMS)
    return starts, min(p.N, chunks // cut.shortest, starts // 2)


def split_training(p: Problem, processors: int) -> Lengths:
    """The lengths for a call with the hand-written backward pass. With ``batch_invariant`` nothing is split, so that no
    length changes a bit."""
    if p.batch_invariant or not 0 < p.N <= MOST_PROGRAMS:
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
    """The lengths for a walk. ``may_split``: whether the forward pass may be split."""
    forward = _forward_times(work, width) if may_split else {None: 0.0}
    back = _back_times(work, width)
    (before, forward_us), (after, back_us) = _fastest(forward), _fastest(back)
    together = {n: us + back[n] - _maps_us(work, width, n) for n, us in forward.items() if n is not None}
    both, us = _fastest(together)
    return Lengths(both, both) if us < forward_us + back_us else Lengths(before, after)


def _fastest(times: dict[int | None, float]) -> tuple[int | None, float]:
    return min(times.items(), key=lambda item: item[1], default=(None, inf))


def _forward_times(work: Work, width: int) -> dict[int | None, float]:
    """The times of a forward walk, by the tokens of a segment. The key None is for whole sequences."""
    pace, (processors, states, chunks) = PACES[width], work
    groups = 1 if width == 64 or 2 * states <= processors else 2
    whole = waves_us(states * width // (64 * groups), processors, pace.setup, chunks, pace.whole[groups])
    shared = LAUNCHES + pace.factor * states * chunks / processors
    times: dict[int | None, float] = {None: WORTH * whole}
    for number, length in splits(chunks):
        # Phi may decay to zero (maps.py). The time is the mean of two cases: no Phi does, and half of them do.
        halves = states * (2 * number - 3)  # halves of maps; the first segment has one map, the last none
        left = halves - states * (number - 2) / 2
        faded = max(1.0, left / processors) * (pace.setup + length * pace.map)  # if one ends early, another begins
        maps = (waves_us(halves, processors, pace.setup, length, pace.map) + faded) / 2
        outputs = waves_us(states * number, processors, pace.setup, length, pace.output)
        times.setdefault(C * length, shared + maps + number * COMPOSE + outputs)
    return times


def _back_times(work: Work, width: int) -> dict[int | None, float]:
    """The same for the backward pass, if it computes maps and the states in between again."""
    pace, (processors, states, chunks) = BACK[width], work

    def walks(states: int, chunks: int) -> float:
        return sum(waves_us(states, processors, pace.setup, chunks, us) for us in (pace.trace, pace.gradient))

    times: dict[int | None, float] = {None: WORTH * walks(states, chunks)}
    for number, length in splits(chunks):
        # 0.75: with gates as at the beginning of training, some of these walks begin late or end early.
        ends = max(1.0, 0.75 * states * (number - 1) / processors) * (pace.setup + length * pace.end)
        found = LAUNCHES + ends + number * COMPOSE + _maps_us(work, width, C * length)
        times.setdefault(C * length, found + walks(states * number, length))
    return times


def _maps_us(work: Work, width: int, tokens: int) -> float:
    """The time that the backward pass saves if the forward pass has left its maps."""
    pace, length = BACK[width], tokens // C
    number = -(-work.chunks // length)
    programs = 0.6 * work.states * (2 * number - 3) / work.processors
    return LAUNCHES + number * COMPOSE + max(1.0, programs) * (pace.setup + length * pace.map)
