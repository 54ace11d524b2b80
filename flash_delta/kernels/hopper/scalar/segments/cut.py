"""Decides which sequences that the device lists (listed.py) are cut into parts, from measured times on an H200
(docs/notes), in microseconds. They are prompts on a pool, and are called prompts here."""

from functools import cache
from math import ceil
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS
from flash_delta.kernels.runtime.pool_launches import prompts_at_most
from flash_delta.kernels.runtime.segment_plan import FEWEST
from flash_delta.problem import Problem

GAIN = 1.25  # a prompt on a pool is cut if this makes it so much faster where it is alone
FEWEST_PARTS, MOST_PARTS = 3, 16  # of a long prompt. Heads that leave room for fewer parts were not measured
LONGEST = 2048  # chunks; prompts are never cut if this only pays for longer ones


class Cut(NamedTuple):
    """How prompts on a pool are cut into parts. Only the heads and the chip decide about these numbers. A prompt's own
    length then decides how it is cut. So no other prompt changes a bit of a result."""

    shortest: int  # a prompt of fewer whole chunks is not cut
    fewest: int  # whole chunks of a prompt for each of its parts
    most: int  # parts of a prompt


class CutPace(NamedTuple):
    """The time of a call with one prompt on a pool. It is call + chunk * chunks if the prompt is whole, and start +
    part_chunk * chunks in parts. ``start_share`` is added to start and ``part_share`` to part_chunk, times the share of
    the multiprocessors that the prompt's heads take."""

    call: float
    chunk: float
    start: float
    start_share: float
    part_chunk: float
    part_share: float


# Fitted to 4 to 32 heads of 128, and 8,192 and 32,768 tokens, within 8 us. Heads of 64 were not measured.
CUTS = {64: CutPace(20, 1.5, 50, 230, 0.16, 1.8), 128: CutPace(20, 1.9, 50, 383, 0.16, 3.23)}


def cut_prompts(p: Problem, processors: int) -> Cut | None:
    """How prompts are cut on a pool. None if no prompt of such heads is."""
    return _cut(p.HV, p.K, processors)


@cache
def _cut(HV: int, width: int, processors: int) -> Cut | None:
    pace, share = CUTS[width], HV / processors
    gained = pace.chunk - GAIN * (pace.part_chunk + pace.part_share * share)  # per chunk
    lost = GAIN * (pace.start + pace.start_share * share) - pace.call
    most = min(MOST_PARTS, processors // HV)
    if most < FEWEST_PARTS or gained * LONGEST < lost:
        return None
    together = 2 * HV * most <= processors  # halves of all parts run at once, and parts may be short
    fewest = FEWEST if together else 2 * FEWEST
    return Cut(max(2 * fewest, ceil(lost / gained)), fewest, most)


def part_length(tokens: int, cut: Cut) -> int:
    """The chunks of a prompt's parts. The last part may have fewer. The device computes the same (`cut_prompt` in
    plans/prompt_list.py, `part_length` in bounds.py)."""
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
