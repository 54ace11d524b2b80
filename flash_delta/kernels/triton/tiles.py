"""The launch numbers of the kernels. There is one table row per kernel and kind of chip.

Rows of sm_90 were measured, up to a width of 128 on an H200 and beyond on an H100 (docs/notes). The others are the
largest tiles that compile without a spill and within a chip's shared memory (``flash-delta-dev compile``).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Chip, Tile, family
from flash_delta.kernels.runtime.segment_plan import ENDLESS, fastest_split, sequences_of, waves_us
from flash_delta.problem import Problem


class Segments(NamedTuple):
    """How sequences are split."""

    length: int  # tokens of a segment, a multiple of C
    maps: Tile  # of the scan that computes the segments' maps
    compose: Tile
    scan: Tile  # of the scan that scans the segments


SMALL = ("sm_86", "sm_89", "sm_120", "sm_121")  # chips with 99 KB of shared memory for a program


def widest_float32(chip: Chip) -> int:
    """The widest heads in float32 whose tiles fit. At 128 the gradients of keys take 152 KB of shared memory (sm_90a),
    and 216 KB with separate erase keys (Comba)."""
    return 128 if chip.target == "interpreter" or family(chip.target) in ("sm_90", "gfx942") else 64


def widest_key(p: Problem, chip: Chip) -> int:
    """The widest K whose tiles fit. With 256 channels of keys and of erase keys (Comba), gradients take 120 KB of
    shared memory, more than these chips have."""
    if p.dtype == torch.float32:
        return widest_float32(chip)
    return 128 if p.erase == "undecayed" and p.needs_grad and chip.target in SMALL else 256


# For heads up to 64, up to 128 and up to 256 wide (the wider of K and V).
TILES = {
    # A thread owns two channels. Measured with a width of 128.
    ("channel", "gfx942"): (Tile(1, 1), Tile(2, 1), Tile(4, 1)),
    ("channel", "sm_80"): (Tile(1, 2), Tile(2, 2), Tile(4, 2)),
    ("channel", "sm_90"): (Tile(1, 3), Tile(2, 3), Tile(4, 3)),
    ("channel", "sm_100"): (Tile(1, 3), Tile(2, 3), Tile(4, 3)),
    ("factor", "gfx942"): (Tile(4, 1),) * 3,
    ("factor", "sm_80"): (Tile(4, 1), Tile(4, 1), Tile(8, 1)),
    ("factor", "sm_90"): (Tile(4, 1, registers=168), Tile(4, 1, registers=168), Tile(8, 1)),
    ("factor", "sm_100"): (Tile(4, 1),) * 3,
    ("pairs", "gfx942"): (Tile(4, 1, 128),) * 3,
    ("pairs", "sm_80"): (Tile(4, 1, 32), Tile(8, 2, 64), Tile(8, 2, 64)),
    ("pairs", "sm_90"): (Tile(4, 1, 128), Tile(4, 1, 128), Tile(4, 1, 64)),
    ("pairs", "sm_100"): (Tile(4, 1, 128), Tile(8, 1, 128), Tile(4, 1, 128)),
    # `pairs` with a gate per channel, where it also computes products with states
    ("channel_pairs", "gfx942"): (Tile(4, 1, 64),) * 3,
    ("channel_pairs", "sm_80"): (Tile(8, 1, 64),) * 3,
    ("channel_pairs", "sm_90"): (*(Tile(8, 1, 128, registers=128),) * 2, Tile(8, 2, 128)),
    ("channel_pairs", "sm_100"): (Tile(8, 1, 64),) * 3,
    ("query_gradients", "gfx942"): (Tile(4, 2, 64),) * 3,
    ("query_gradients", "sm_80"): (Tile(4, 2, 64), Tile(8, 2, 64), Tile(8, 2, 64)),
    ("query_gradients", "sm_90"): (Tile(4, 3, 64), Tile(4, 3, 64), Tile(8, 2, 128)),
    ("query_gradients", "sm_100"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(8, 2, 64)),
    ("key_gradients", "gfx942"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(4, 1, 16)),
    ("key_gradients", "sm_80"): (Tile(8, 1, 32), Tile(8, 1, 16), Tile(8, 1, 16)),
    ("key_gradients", "sm_90"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(8, 2, 64)),
    ("key_gradients", "sm_100"): (Tile(4, 2, 64), Tile(8, 1, 32), Tile(16, 1, 16)),
    # 16 channels. From 64 channels on products are wgmma, and the assembler of Triton 3.6 loses some of their
    # descriptors here, which gave illegal addresses on an H200 (docs/notes).
    ("halved_gradients", "gfx942"): (Tile(4, 1, 64),) * 3,
    ("halved_gradients", "sm_80"): (Tile(4, 1, 16),) * 3,
    ("halved_gradients", "sm_90"): (Tile(4, 1, 16, registers=168),) * 3,
    ("halved_gradients", "sm_100"): (Tile(4, 1, 16),) * 3,
    # 16 channels per warp, and no wgmma either. Measured with a width of 128.
    ("channel_gradients", "gfx942"): (Tile(2, 1, 32),) * 3,
    ("channel_gradients", "sm_80"): (Tile(2, 2, 32),) * 3,
    ("channel_gradients", "sm_90"): (Tile(2, 3, 32),) * 3,
    ("channel_gradients", "sm_100"): (Tile(2, 3, 32),) * 3,
    ("scan", "gfx942"): (Tile(4, 1, 32), Tile(4, 1, 32), Tile(4, 1, 16)),
    ("scan", "sm_80"): (Tile(4, 2, 32), Tile(4, 2, 32), Tile(8, 1, 16)),
    ("scan", "sm_90"): (Tile(8, 2, 32),) * 3,  # see SCANS
    ("scan", "sm_100"): (Tile(8, 2, 32),) * 3,
    # The next map is loaded during the product with this one.
    ("compose", "gfx942"): (Tile(4, 1, 16), Tile(8, 1, 16)),
    ("compose", "sm_80"): (Tile(4, 2, 16), Tile(8, 2, 16)),
    ("compose", "sm_90"): (Tile(4, 3, 16), Tile(8, 3, 16)),
    ("compose", "sm_100"): (Tile(4, 2, 16), Tile(8, 2, 16)),
    # without output, for the maps of segments (heads of 256 are never split)
    ("maps", "gfx942"): (Tile(4, 1, 32),) * 2,
    ("maps", "sm_80"): (Tile(4, 2, 32),) * 2,
    ("maps", "sm_90"): (Tile(4, 3, 64, tma=True),) * 2,
    ("maps", "sm_100"): (Tile(4, 2, 32, tma=True),) * 2,
    ("channel_maps", "gfx942"): (Tile(4, 1, 32),) * 2,
    ("channel_maps", "sm_80"): (Tile(4, 2, 32),) * 2,
    ("channel_maps", "sm_90"): (Tile(4, 3, 64, tma=True), Tile(8, 3, 128, tma=True)),
    ("channel_maps", "sm_100"): (Tile(4, 2, 32, tma=True),) * 2,
    ("scan_backward", "gfx942"): (Tile(4, 1, 32), Tile(4, 1, 32), Tile(4, 1, 16)),
    ("scan_backward", "sm_80"): (Tile(4, 2, 32), Tile(8, 2, 32), Tile(8, 1, 16)),
    ("scan_backward", "sm_90"): (Tile(8, 2, 16),) * 3,
    ("scan_backward", "sm_100"): (Tile(8, 2, 16),) * 3,
}
# For key gradients over 128 wide with separate erase keys (Comba). With two stages, the usual tile would need more
# shared memory than there is.
OWN_ERASE_KEYS = {"sm_90": Tile(8, 1, 16)}
# On every chip:
WARP = Tile(1, 1)  # for solve and gates: one warp, which needs no barriers
HEADS = Tile(8, 1)  # for key_head_gradients, which is bound by memory
# For float32, which is for comparisons, and heads up to 64 and up to 128 wide. Some kernels spill with any tile.
FLOAT32 = {
    "channel": (Tile(1, 1), Tile(2, 1)),
    # With eight warps and heads of 16, Y is 4e-4 off on an H200 (Triton 3.6; docs/notes).
    "factor": (Tile(4, 1), Tile(4, 1)),
    "scan": (Tile(8, 1, 16), Tile(8, 1, 16)),
    "scan_backward": (Tile(8, 1, 16), Tile(8, 1, 16)),
    "pairs": (Tile(8, 1, 16), Tile(8, 1, 16)),
    "query_gradients": (Tile(8, 1, 16), Tile(8, 1, 16)),
    "key_gradients": (Tile(8, 1, 32), Tile(8, 1, 16)),
    "halved_gradients": (Tile(4, 1, 16), Tile(4, 1, 16)),
}


def copied(*stages: int) -> tuple[Tile, ...]:
    """Tiles of 16, 32, 64 and 128 value columns, with the copy engine. ``stages``: for each, the chunks in memory."""
    widths = ((4, 16), (4, 32), (4, 64), (8, 128))
    return tuple(Tile(warps, n, BV, tma=True) for (warps, BV), n in zip(widths, stages, strict=True))


SCAN_KINDS = ("scan", "scan_kept", "scan_backward", "scan_both")
# For keys up to 128 wide, where the copy engine helps. The narrowest tile comes first. Narrow tiles make more programs
# from few heads. Wide tiles move less memory if there are many heads.
SCANS = {
    ("scan", "sm_90"): copied(4, 4, 3, 3),
    ("scan_kept", "sm_90"): copied(4, 4, 2, 2),
    ("scan_backward", "sm_90"): copied(4, 4, 3, 2),
    ("scan_both", "sm_90"): copied(4, 3, 3, 2),
} | {(kind, "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 3, 64, tma=True)) for kind in SCAN_KINDS}
# The same with a decay per channel, where scans also load A (for 128 columns see `scan`).
CHANNEL_SCANS = {
    ("scan", "sm_90"): copied(4, 4, 3, 3),
    ("scan_kept", "sm_90"): copied(3, 3, 2, 2),
    ("scan_backward", "sm_90"): copied(3, 3, 2, 2),
    ("scan_both", "sm_90"): copied(3, 3, 2, 2),
} | {(kind, "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 2, 64, tma=True)) for kind in SCAN_KINDS}
# For keys more than 128 wide, with any gate. Measured on an H100. A tile of 64 columns spills.
WIDE_BACK = (Tile(4, 2, 16, tma=True), Tile(8, 2, 32, tma=True))
WIDE_SCANS = {("scan_backward", "sm_90"): WIDE_BACK, ("scan_both", "sm_90"): WIDE_BACK}


class Pace(NamedTuple):
    """The times of scans on a chip, in us; see runtime/segment_plan.py."""

    setup: float  # before a program's first chunk, mostly for descriptors
    scan: dict[int, float]  # per chunk, by a program's value columns, with one program on each multiprocessor
    other: float  # the same with any other number of columns
    maps: float  # per chunk, for a map's columns
    together: int  # programs with such columns that share a multiprocessor
    launches: float  # for launching two more kernels
    compose: float  # per segment
    worth: float  # segments are chosen if they take at most this share of a whole scan's time


# Measured on an H200 (docs/notes), with a decay per channel and without.
PACES = {
    (False, "sm_90"): Pace(10.0, {16: 0.88, 32: 1.27, 64: 1.53, 128: 2.5}, 2.5, 1.07, 2, 8.0, 2.0, 0.9),
    (True, "sm_90"): Pace(10.0, {16: 1.25, 32: 1.5, 64: 1.87, 128: 3.5}, 3.5, 1.72, 1, 8.0, 2.0, 0.9),
}
# For other chips, nothing was measured: a chunk of a map takes 0.7 of a scan's chunk, as it has fewer products. So
# segments have to promise more.
PACE = Pace(10.0, {}, 1.0, 0.7, 1, 10.0, 2.0, 0.7)
# For the backward pass, as multiples of the scan's time per chunk: the scan again together with the backward scan, and
# the scan that finds the ends of segments. And the share of a whole scan's time that segments may take. These are
# estimates. They agree with the few rows that were timed (docs/notes/2026-11-24-walk-back.md), but none was measured
# separately.
BOTH, ENDS, BACK_WORTH = 1.8, 1.3, 0.85
# For decoding, by ``state_v_first`` and the bytes of a number in the pool, for K up to 64, up to 128 and up to 256.
# With values first, the rows of a tile belong to one warp, so there are no barriers. With keys first, a tile should
# have whole lines of memory. Measured on an H200 with 64 and with 256 rows (docs/notes).
DECODE = {
    (True, 4): (Tile(1, 1, 8), Tile(1, 1, 8), Tile(1, 1, 4)),
    (True, 2): (Tile(1, 1, 16), Tile(1, 1, 16), Tile(1, 1, 4)),
    (False, 4): (Tile(2, 1, 32), Tile(4, 1, 64), Tile(4, 1, 64)),
    (False, 2): (Tile(1, 1, 32), Tile(2, 1, 64), Tile(4, 1, 64)),
}
# For few rows with a decay per head, K from 65 to 128 and V over 64. Programs are smaller, so that all run at once. By
# the bytes of a number in the pool; and the most columns per multiprocessor for which this holds.
FEW, FEW_COLUMNS = {4: Tile(1, 1, 4), 2: Tile(1, 1, 8)}, 128
# For drafts that leave records, with values first and K up to 128: with few rows, and with more. Measured on an H200
# with a width of 128: wide programs share more of what a token takes besides the state. By the bytes of a number in the
# pool, as narrow tiles of narrow heads would leave a thread less than it loads at once, and so other sums.
RECORDS = {4: (Tile(1, 1, 8), Tile(1, 1, 32)), 2: (Tile(1, 1, 16), Tile(1, 1, 32))}
# For the shortest of them, whose tokens and records a program holds while it goes from tile to tile (serving/ring.py):
# for K up to 64 and up to 128. A decay per channel takes so many registers that tiles are narrower. And how many
# programs may share a multiprocessor. A program gets enough tiles for all programs to run at once.
HELD = {
    ("head", 4): (Tile(1, 2, 8), Tile(1, 2, 8)),
    ("head", 2): (Tile(1, 2, 16), Tile(1, 2, 8)),
    ("channel", 4): (Tile(1, 2, 8), Tile(1, 2, 4)),
    ("channel", 2): (Tile(1, 2, 16), Tile(1, 2, 4)),
}
HELD_TOKENS, TOGETHER = 4, 8


def decode_tiles(p: Problem, chip: Chip, every: bool) -> tuple[Tile, ...]:
    """The tiles of decoding. ``every``: all tiles that other batch sizes may choose. A row's bits do not depend on the
    tile, since a tile of few rows has as many warps as a wider one, and its sums go over the same threads."""
    size = max(p.pools.dtype.itemsize, (p.pools.write_dtype or p.pools.dtype).itemsize)
    usual = DECODE[p.state_v_first, size][(p.K > 64) + (p.K > 128)]
    if p.gate.kind == "channel" or not (p.state_v_first and 64 < p.K <= 128) or p.V <= 64:
        return (usual,)
    return (FEW[size], usual) if every else (FEW[size] if _are_few(p, chip) else usual,)


def record_tiles(p: Problem, chip: Chip, every: bool) -> tuple[Tile, ...]:
    """The tiles of drafts that leave records and of what applies these to states, as `decode_tiles`."""
    if not p.state_v_first or p.K > 128:
        return decode_tiles(p, chip, every)
    few, usual = RECORDS[p.pools.dtype.itemsize]
    return (few, usual) if every else (few if _are_few(p, chip) else usual,)


def held_tile(p: Problem) -> Tile | None:
    """The tile of a draft that leaves records, if its programs hold its tokens and the records before them."""
    if not p.state_v_first or p.K > 128 or max(p.pools.most_tokens or p.T, p.pools.records) > HELD_TOKENS:
        return None
    return HELD["channel" if p.gate.kind == "channel" else "head", p.pools.dtype.itemsize][p.K > 64]


def _are_few(p: Problem, chip: Chip) -> bool:
    return (p.N if p.packed else p.B) * p.HV * p.V <= FEW_COLUMNS * chip.processors


def tile(kernel: str, p: Problem, chip: Chip) -> Tile:
    if kernel == "key_gradients" and p.erase == "undecayed" and max(p.K, p.V) > 128 and p.dtype != torch.float32:
        return OWN_ERASE_KEYS.get(family(chip.target)) or _tile(kernel, chip.target, p.dtype, p.K, p.V)
    return _tile(kernel, chip.target, p.dtype, p.K, p.V)


def scan_tiles(kernel: str, p: Problem, chip: Chip, every: bool) -> tuple[Tile, ...]:
    """The narrowest tile with which all programs run at once. ``every``: all tiles that other batch sizes may choose.

    "scan_kept" is the scan that writes both the output and what the backward pass needs (``disable_recompute``).
    "scan_both" is the launch with the backward scan and a second run of the forward scan. For batch invariance the tile
    is that of a sequence alone. Hopper is an exception, since all its tiles give the same bits
    (tests/test_prefill_gpu.py).
    """
    if p.batch_invariant and family(chip.target) != "sm_90":
        p, every = p._replace(N=1), False
    states = p.N * p.HV * (2 if kernel == "scan_both" else 1)
    return _scan_tiles(kernel, p.gate.kind == "channel", chip, p.dtype, p.K, p.V, 0 if every else max(1, states))


def plan_segments(p: Problem, chip: Chip) -> Segments | None:
    """How long sequences are split, or None if that is not faster.

    None also if a split would change promised bits: with ``batch_invariant``, and on a pool, where a prompt that is cut
    at a multiple of 64 tokens gives the same bits as a whole one (ops/serving/prefill.py). A scan that writes the
    states of chunks also scans whole sequences.
    """
    if p.N == 0 or plan_endless(p, chip) is None:
        return None
    return _fitting(p, _plan_segments(p.gate.kind == "channel", chip, p.dtype, p.HV, p.K, p.V, *sequences_of(p)), 1)


def plan_endless(p: Problem, chip: Chip) -> Segments | None:
    """The plan for one endless sequence. None if such calls are never split. Then nothing is compiled for splits."""
    if p.pools is not None or p.batch_invariant or p.writes_states:
        return None
    return _plan_segments(p.gate.kind == "channel", chip, p.dtype, p.HV, p.K, p.V, 1, ENDLESS)


def plan_back(p: Problem, chip: Chip) -> Segments | None:
    """How long sequences are split in the backward pass, or None if that is not faster. The forward pass may have
    written the states of chunks."""
    if p.N == 0 or plan_back_endless(p, chip) is None:
        return None
    return _fitting(p, _plan_back(p.gate.kind == "channel", chip, p.dtype, p.HV, p.K, p.V, *sequences_of(p)), 2)


def _fitting(p: Problem, split: Segments | None, programs: int) -> Segments | None:
    """The split, if a grid has room for all segments along its last axis. ``programs``: those of a segment."""
    return split if split is None or programs * count_slots(p, split.length) <= MOST_PROGRAMS else None


def plan_back_endless(p: Problem, chip: Chip) -> Segments | None:
    return plan_endless(p._replace(keep_states=False, disable_recompute=False), chip)


def back_tiles(p: Problem, chip: Chip, length: int, every: bool, *, recompute: bool) -> tuple[Tile, ...]:
    """The tile of the backward scan in segments. There are many segments, so it is one of the two widest: the narrower
    one if all its programs can run at once. ``every``: both."""
    kernel = "scan_both" if recompute else "scan_backward"
    tiles = _scan_tiles(kernel, p.gate.kind == "channel", chip, p.dtype, p.K, p.V, 0)[-2:]
    scans = count_slots(p, length) * p.HV * (1 + recompute)
    return tiles if every else (next((t for t in tiles if scans * -(-p.V // t.BV) <= chip.processors), tiles[-1]),)


def maps_tile(p: Problem, chip: Chip) -> Tile:
    return _tile("channel_maps" if p.gate.kind == "channel" else "maps", chip.target, p.dtype, p.K, p.V)


def segment_tiles(p: Problem, chip: Chip) -> tuple[Tile, ...]:
    """The tiles for the scan that scans segments: the two widest, since there are enough segments to fill the chip."""
    return _scan_tiles("scan", p.gate.kind == "channel", chip, p.dtype, p.K, p.V, 0)[-2:]


# Called for every launch. A cached answer takes 0.3 us.


@lru_cache
def _tile(kernel: str, target: str, dtype: torch.dtype, K: int, V: int) -> Tile:
    width = max(K, V)
    if dtype == torch.float32:
        return FLOAT32[kernel][width > 64]
    return TILES[kernel, family(target)][(width > 64) + (width > 128)]


@lru_cache(maxsize=1024)
def _scan_tiles(
    kernel: str, channel: bool, chip: Chip, dtype: torch.dtype, K: int, V: int, states: int
) -> tuple[Tile, ...]:
    """The tiles of a scan. ``states``: the number of states that scan at once; 0: any number."""
    table = WIDE_SCANS if K > 128 else CHANNEL_SCANS if channel else SCANS
    choices = table.get((kernel, family(chip.target)))
    if choices is None or dtype == torch.float32:
        name = {"scan_kept": "scan", "scan_both": "scan_backward"}.get(kernel, kernel)
        return (_tile(name, chip.target, dtype, K, V),)
    choices = tuple(t for t in choices if t.BV < 2 * V) or choices[:1]
    if not states:
        return choices
    return (next((t for t in choices if states * -(-V // t.BV) <= chip.processors), choices[-1]),)


def _scan_us(chunk_us: float, channel: bool, chip: Chip, width: int, tile: Tile, states: int, length: int) -> float:
    """The time of programs that scan ``states`` through ``length`` chunks, each in ``chunk_us`` times a scan's time."""
    pace = PACES.get((channel, family(chip.target)), PACE)
    chunk = chunk_us * pace.scan.get(tile.BV, pace.other)
    return waves_us(states * -(-width // tile.BV), chip.processors, pace.setup, length, chunk)


def _maps_us(channel: bool, chip: Chip, K: int, V: int, tile: Tile, states: int, number: int, length: int) -> float:
    """The time for the maps of ``number`` segments. The first segment needs a map's value columns only, and the last
    one needs no map. The others need value and key columns."""
    pace = PACES.get((channel, family(chip.target)), PACE)
    programs = states * (-(-V // tile.BV) + (number - 2) * -(-(V + K) // tile.BV))
    maps = waves_us(programs, pace.together * chip.processors, pace.setup, length, pace.maps)
    return maps + pace.launches + number * pace.compose


@lru_cache(maxsize=1024)
def _plan_segments(
    channel: bool, chip: Chip, dtype: torch.dtype, HV: int, K: int, V: int, N: int, chunks: int
) -> Segments | None:
    """The plan for ``N`` sequences of ``chunks`` each."""
    if dtype == torch.float32 or max(K, V) > 128:
        return None
    pace, scans = PACES.get((channel, family(chip.target)), PACE), _scan_tiles("scan", channel, chip, dtype, K, V, 0)
    mapping = _tile("channel_maps" if channel else "maps", chip.target, dtype, K, V)
    composing = _tile("compose", chip.target, dtype, K, V)

    def times(number: int, length: int) -> Iterator[tuple[float, Segments]]:
        shared = _maps_us(channel, chip, K, V, mapping, N * HV, number, length)
        for tile in scans[-2:]:
            us = shared + _scan_us(1.0, channel, chip, V, tile, N * HV * number, length)
            yield us, Segments(C * length, mapping, composing, tile)

    (whole,) = _scan_tiles("scan", channel, chip, dtype, K, V, N * HV)
    return fastest_split(chunks, pace.worth * _scan_us(1.0, channel, chip, V, whole, N * HV, chunks), times)


@lru_cache(maxsize=1024)
def _plan_back(
    channel: bool, chip: Chip, dtype: torch.dtype, HV: int, K: int, V: int, N: int, chunks: int
) -> Segments | None:
    pace = PACES.get((channel, family(chip.target)), PACE)
    mapping = _tile("channel_maps" if channel else "maps", chip.target, dtype, K, V)
    composing = _tile("compose", chip.target, dtype, K, V)

    def scan_us(kind: str, chunk_us: float, states: int, length: int, choices: int) -> float:
        tiles = _scan_tiles(kind, channel, chip, dtype, K, V, 0)[-choices:]
        tile = next((t for t in tiles if states * -(-V // t.BV) <= chip.processors), tiles[-1])
        return _scan_us(chunk_us, channel, chip, V, tile, states, length)

    def times(number: int, length: int) -> Iterator[tuple[float, Segments]]:
        shared = _maps_us(channel, chip, K, V, mapping, N * HV, number, length) + pace.launches + number * pace.compose
        ends = scan_us("scan_backward", ENDS, N * HV * number, length, 2)
        both = scan_us("scan_both", BOTH, 2 * N * HV * number, length, 2)
        yield shared + ends + both, Segments(C * length, mapping, composing, mapping)

    whole = scan_us("scan_both", BOTH, 2 * N * HV, chunks, 4)
    return fastest_split(chunks, BACK_WORTH * whole, times)
