"""The plan of a call: which kernels scan its states, and how long segments are. The plan is what takes the least time.

All times are in quarters of a microsecond, on an H200 (docs/notes). A program of a kernel takes `Pace.time`. Programs
of a loop, and of the backward pass's scans through whole sequences, get equal shares of all chunks (plans/tape.py).
So these take as long as the longest sequence, or as a program's share. Programs of other kernels scan whole items, in
rounds of one program per multiprocessor."""

from functools import lru_cache
from math import ceil
from operator import itemgetter
from typing import NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.plans.tiles import (
    CHANNEL_HALF,
    CHANNEL_HALF_PACE,
    CHANNEL_PACE,
    CHANNEL_SCAN_PACE,
    CHANNEL_WHOLE,
    NARROW,
    RETRACE_PACE,
    SAVING,
    SCAN_GRADIENTS_PACE,
    SLIM,
    WIDE,
    ChannelTile,
    LoopTile,
    Pace,
)
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Chip
from flash_delta.kernels.runtime.pool_launches import PoolLaunch, pool_launches
from flash_delta.kernels.runtime.segment_plan import ENDLESS, sequences_of, splits
from flash_delta.problem import Problem

LAUNCHES = 44  # for launching more kernels than the loop
FACTOR, PREPARE = 4, 22  # of a multiprocessor, per chunk and head
# Paces: of `find_maps`, which scans halves of maps; of `scan_segments`; and of `scan_gradients` where it only finds
# ends of segments. With heads of 64 these and FACTOR take about NARROWER of the time.
MAP, SCAN, NARROWER = Pace(5, 32), Pace(9, 32), {64: 0.55, 128: 1}
BACK = RETRACE_PACE, SCAN_GRADIENTS_PACE  # by the width of heads
COMPOSE = 8  # per segment, in `compose_maps`
# The share of work that is left if gates are as at the beginning of training: half of all Phi decay to zero (maps.py),
# and some scans for ends of segments begin late.
LEFT = 0.75


class Sizes(NamedTuple):
    """What a plan depends on."""

    processors: int
    states: int  # value heads of all sequences, which count as equally long (`sequences_of`)
    chunks: int  # of such a sequence
    items: int  # value heads of all sequences that there are

    def taped(self, pace: Pace, parts: int = 1) -> float:
        """The time of a scan on a tape, with ``parts`` programs per state."""
        share = parts * (self.states * self.chunks * pace.chunk + self.items * pace.item) / self.processors
        return max(pace.time(self.chunks), share)

    def rounds(self, pace: Pace, programs: int, number: int = 1) -> float:
        """The time of another scan, with so many programs per state, in ``number`` segments of each sequence."""
        return ceil(self.states * programs / self.processors) * pace.time(ceil(self.chunks / number))

    def early(self, pace: Pace, programs: int, number: int) -> float:
        """The time of `rounds` if some programs end early. Then other programs begin."""
        return max(1.0, LEFT * self.states * programs / self.processors) * pace.time(ceil(self.chunks / number))

    def short(self, pace: Pace, programs: int = 1) -> float:
        """About the time that such a scan takes for all sequences that are shorter than the longest one."""
        return programs * (self.items - self.states) * pace.item / self.processors

    def shared(self, chunk: float) -> float:
        """The time of a kernel that takes ``chunk`` for a chunk and head. All multiprocessors share its work."""
        return chunk * self.states * self.chunks / self.processors


def _sizes(p: Problem, processors: int) -> Sizes:
    sequences, chunks = sequences_of(p)
    return Sizes(processors, sequences * p.HV, chunks, p.N * p.HV)


def _endless(p: Problem, processors: int) -> Sizes:
    """The sizes of one endless sequence."""
    return Sizes(processors, p.HV, ENDLESS, p.HV)


# One decay per value head.


def loop_tiles(width: int, saving: bool) -> tuple[LoopTile, ...]:
    """The tiles of the loop that a call may select. WIDE and NARROW give the same bits. ``saving``: the loop writes
    what the backward pass needs."""
    return (SAVING[width],) if saving else (SLIM,) if width == 64 else (WIDE, NARROW)


def loop_tile(p: Problem, chip: Chip, saving: bool) -> LoopTile:
    """The tile that a call selects."""
    tiles = loop_tiles(p.K, saving)
    return tiles[0] if len(tiles) == 1 else _loops(_sizes(p, chip.processors), p.K)[1]


@lru_cache(maxsize=1024)
def _loops(s: Sizes, width: int) -> tuple[float, LoopTile]:
    """The least time of the loop, and its tile."""
    times = ((s.taped(t.pace, width // (64 * t.groups)), t) for t in loop_tiles(width, saving=False))
    return min(times, key=itemgetter(0))


def split_length(p: Problem, processors: int, *, back: bool = False) -> int | None:
    """Tokens of a segment, or None if whole sequences are faster. ``back``: the backward pass is by hand. It has the
    same segments, since then it can use the forward pass's maps.

    With ``batch_invariant`` nothing is split, so that no length changes a bit."""
    if not 0 < p.N <= MOST_PROGRAMS or split_endless(p, processors, back=back) is None:
        return None  # `compose_maps` has a program for each sequence
    return _split(_sizes(p, processors), p.K, back)


def split_endless(p: Problem, processors: int, *, back: bool = False) -> int | None:
    """The length for one endless sequence. None if such calls are never split. Then nothing is compiled for splits."""
    if p.batch_invariant or p.K not in NARROWER:
        return None
    return _split(_endless(p, processors), p.K, back)


@lru_cache(maxsize=1024)
def _split(s: Sizes, width: int, back: bool) -> int | None:
    walked_back = sum(s.taped(pace[width]) for pace in BACK)
    times: dict[int | None, float] = {None: _loops(s, width)[0] + back * walked_back}
    for number, length in splits(s.chunks):
        us = _in_segments(s, width, number) + back * _in_segments_back(s, width, number)
        times.setdefault(C * length, us)
    return min(times, key=times.__getitem__)


def _in_segments(s: Sizes, width: int, number: int) -> float:
    """The time of the forward pass in ``number`` segments of each sequence."""
    halves = 2 * number - 3  # of maps, per state; the first segment has one map, the last none
    maps = (s.rounds(MAP, halves, number) + s.early(MAP, halves, number)) / 2  # whether they end early depends on gates
    scans = s.shared(FACTOR) + maps + s.rounds(SCAN, number, number) + s.short(SCAN)
    return LAUNCHES + COMPOSE * number + NARROWER[width] * scans


def _in_segments_back(s: Sizes, width: int, number: int) -> float:
    """The time of the backward pass in ``number`` segments of each sequence, with the maps of the forward pass."""
    ends = NARROWER[width] * s.early(SCAN, number - 1, number)
    return LAUNCHES + COMPOSE * number + ends + sum(s.rounds(pace[width], number, number) for pace in BACK)


# A decay per channel.

CHANNEL_TILES = CHANNEL_WHOLE, CHANNEL_HALF


def channel_tile(p: Problem, chip: Chip) -> ChannelTile | None:
    """The tile of the loop that does everything, with a whole state or half a state per program. None: `prepare` runs,
    and then a scan of the states."""
    return _channel_tile(_sizes(p, chip.processors))


@lru_cache(maxsize=1024)
def _channel_tile(s: Sizes) -> ChannelTile | None:
    half, time = (s.rounds(pace, 2) + s.short(pace, 2) for pace in (CHANNEL_HALF_PACE, CHANNEL_SCAN_PACE))
    time += LAUNCHES + s.shared(PREPARE)
    times = {CHANNEL_WHOLE: s.taped(CHANNEL_PACE), CHANNEL_HALF: half, None: time}
    return min(times, key=times.__getitem__)


def may_scan_channels(p: Problem, chip: Chip) -> bool:
    """Whether there are few enough heads for `prepare` and a scan to be faster than the loop: for one long sequence, or
    for any."""
    return _channel_tile(_endless(p, chip.processors)) is None


def channel_pool_launches(p: Problem, chip: Chip, *, every: bool) -> tuple[PoolLaunch, ...]:
    """How prompts on a pool are scanned: by the loop with a tile, or by `prepare` and `scan_channels` (None).

    With few heads the latter scan prompts as long as all halves of states run at once
    (docs/notes/2026-11-26-kda-few-heads.md). If no sequence may change a bit of another sequence, there is only one
    way. With few heads it is the one that is never much slower than the other.
    """
    few, halves = may_scan_channels(p, chip), chip.processors >= 2 * p.HV
    ways = (None, CHANNEL_WHOLE) if few else (CHANNEL_HALF, CHANNEL_WHOLE) if halves else (CHANNEL_WHOLE,)
    if p.batch_invariant:
        ways = (None,) if few else (CHANNEL_WHOLE,)
    if every:
        return tuple(PoolLaunch(way, max(1, p.N)) for way in ways)
    return pool_launches(p, chip, ways, lambda _: 2 * p.HV)


def loop_parts(p: Problem, chip: Chip) -> int:
    """The number of parts into which the loop cuts sequences if gates forget: as many as run at once, of at least 512
    tokens each."""
    return max(1, min(chip.processors // (p.N * p.HV), p.T // (512 * (p.N if p.packed else 1))))
