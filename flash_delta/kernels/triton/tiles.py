"""The launch numbers of the kernels: one table row per kernel and kind of chip, from measurements or the compile gate.

Rows of sm_90 up to a width of 128 were measured on an H200 (docs/notes); the others are the largest tiles that compile
without a spill and within a chip's shared memory (``flash-delta compile``).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton import next_power_of_2
from triton.runtime.driver import driver

from flash_delta.problem import Problem


class Tile(NamedTuple):
    warps: int
    stages: int
    BV: int = 0  # value columns of one program, or of one step of its loop; key channels of channel_gradients
    tma: bool = False  # whole tiles by the copy engine, where the tensors allow it (launch.fits_tma)
    registers: int | None = None  # at most so many per thread


class Chip(NamedTuple):
    target: str  # "sm_90", "gfx942"; "interpreter" on the CPU
    processors: int  # that run programs side by side


def chip_of(device: torch.device) -> Chip:
    """The chip that kernels on ``device`` are compiled for."""
    if device.type == "cpu":
        return Chip("interpreter", 1)
    if device.type == "meta":  # the compile gate's (compiler/offline.py)
        target = driver.active.get_current_target()
        return Chip(target.arch if target.backend == "hip" else f"sm_{target.arch}", 1)
    return _chip(device.index)


@lru_cache
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return Chip(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
    return Chip(properties.gcnArchName.split(":")[0], properties.multi_processor_count)


def precision(p: Problem, chip: Chip) -> str:
    """The input precision of float32 products; AMD's matrix cores take float32 as it is."""
    if chip.target.startswith("gfx") or chip.target == "interpreter":
        return "ieee"
    return "tf32x3" if p.dtype == torch.float32 else "tf32"


def family(target: str) -> str:
    """The chip of the tables that ``target`` is most like: by its matrix instructions, and by its shared memory."""
    if target.startswith("gfx"):
        return "gfx942"
    return {"sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}.get(target, "sm_80")  # consumer chips, too


def widest_float32(chip: Chip) -> int:
    """The widest heads in float32 whose tiles fit: at 128 the gradients of keys take 152 KB of shared memory (sm_90a),
    and 216 KB where the erase keys are tensors of their own (Comba)."""
    return 128 if chip.target == "interpreter" or family(chip.target) in ("sm_90", "gfx942") else 64


def overlaps(p: Problem, chip: Chip) -> bool:
    """Whether a kernel may start before the one before it has ended (chunk.follow). float32 has no haste."""
    hopper_or_later = family(chip.target) in ("sm_90", "sm_100") or chip.target.startswith("sm_12")
    return hopper_or_later and p.dtype != torch.float32


def takes_tma(chip: Chip) -> bool:
    """Whether the table has tiles for the chip's copy engine."""
    return family(chip.target) in ("sm_90", "sm_100")


# Of heads up to 64, up to 128 and up to 256 wide (the wider of K and V).
TILES = {
    # A thread owns two channels; measured 128 wide.
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
    # with the state's products
    ("channel_pairs", "gfx942"): (Tile(4, 1, 64),) * 3,
    ("channel_pairs", "sm_80"): (Tile(8, 1, 64),) * 3,
    ("channel_pairs", "sm_90"): (Tile(8, 1, 128, registers=128),) * 3,
    ("channel_pairs", "sm_100"): (Tile(8, 1, 64),) * 3,
    ("query_gradients", "gfx942"): (Tile(4, 2, 64),) * 3,
    ("query_gradients", "sm_80"): (Tile(4, 2, 64), Tile(8, 2, 64), Tile(8, 2, 64)),
    ("query_gradients", "sm_90"): (Tile(4, 3, 64), Tile(4, 3, 64), Tile(8, 2, 64)),
    ("query_gradients", "sm_100"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(8, 2, 64)),
    ("key_gradients", "gfx942"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(4, 1, 16)),
    ("key_gradients", "sm_80"): (Tile(8, 1, 32), Tile(8, 1, 16), Tile(8, 1, 16)),
    ("key_gradients", "sm_90"): (Tile(4, 2, 64), Tile(4, 2, 64), Tile(8, 1, 16)),
    ("key_gradients", "sm_100"): (Tile(4, 2, 64), Tile(8, 1, 32), Tile(16, 1, 16)),
    # 16 channels: from 64 on products are wgmma, and here the assembler of Triton 3.6 loses the descriptors of
    # some: illegal addresses on an H200 (docs/notes).
    ("halved_gradients", "gfx942"): (Tile(4, 1, 64),) * 3,
    ("halved_gradients", "sm_80"): (Tile(4, 1, 16),) * 3,
    ("halved_gradients", "sm_90"): (Tile(4, 1, 16, registers=168),) * 3,
    ("halved_gradients", "sm_100"): (Tile(4, 1, 16),) * 3,
    # 16 channels of a warp, and no wgmma, either; measured 128 wide
    ("channel_gradients", "gfx942"): (Tile(2, 1, 32),) * 3,
    ("channel_gradients", "sm_80"): (Tile(2, 2, 32),) * 3,
    ("channel_gradients", "sm_90"): (Tile(2, 3, 32),) * 3,
    ("channel_gradients", "sm_100"): (Tile(2, 3, 32),) * 3,
    ("scan", "gfx942"): (Tile(4, 1, 32), Tile(4, 1, 32), Tile(4, 1, 16)),
    ("scan", "sm_80"): (Tile(4, 2, 32), Tile(4, 2, 32), Tile(8, 1, 16)),
    ("scan", "sm_90"): (Tile(8, 2, 32),) * 3,  # see SCANS
    ("scan", "sm_100"): (Tile(8, 2, 32),) * 3,
    ("scan_backward", "gfx942"): (Tile(4, 1, 32), Tile(4, 1, 32), Tile(4, 1, 16)),
    ("scan_backward", "sm_80"): (Tile(4, 2, 32), Tile(8, 2, 32), Tile(8, 1, 16)),
    ("scan_backward", "sm_90"): (Tile(8, 2, 16),) * 3,
    ("scan_backward", "sm_100"): (Tile(8, 2, 16),) * 3,
}
# On every chip:
WARP = Tile(1, 1)  # of solve and gates: one warp, whose steps need no barrier
HEADS = Tile(8, 1)  # of key_head_gradients, which moves memory

# Of float32, which is there to be compared with; of heads up to 64 and up to 128 wide. Some spill whatever the tile
# (gate.py).
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

# Heads up to 128 wide where the copy engine helps. Blocks of value columns, the narrowest first: more programs for few
# heads, less traffic for many.
SCANS = {
    ("scan", "sm_90"): (
        Tile(4, 4, 16, tma=True),
        Tile(4, 4, 32, tma=True),
        Tile(4, 3, 64, tma=True),
        Tile(8, 3, 128, tma=True),
    ),
    ("scan_kept", "sm_90"): (
        Tile(4, 4, 16, tma=True),
        Tile(4, 4, 32, tma=True),
        Tile(4, 2, 64, tma=True),
        Tile(8, 2, 128, tma=True),
    ),
    ("scan_backward", "sm_90"): (
        Tile(4, 4, 16, tma=True),
        Tile(4, 4, 32, tma=True),
        Tile(4, 3, 64, tma=True),
        Tile(8, 2, 128, tma=True),
    ),
    ("scan_both", "sm_90"): (
        Tile(4, 4, 16, tma=True),
        Tile(4, 3, 32, tma=True),
        Tile(4, 3, 64, tma=True),
        Tile(8, 2, 128, tma=True),
    ),
    ("scan", "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 3, 64, tma=True)),
    ("scan_kept", "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 3, 64, tma=True)),
    ("scan_backward", "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 3, 64, tma=True)),
    ("scan_both", "sm_100"): (Tile(4, 2, 32, tma=True), Tile(8, 3, 64, tma=True)),
}

# The same with a decay per channel, where they load A, too (at 128 columns see `scan`).
CHANNEL_SCANS = {
    ("scan", "sm_90"): (
        Tile(4, 4, 16, tma=True),
        Tile(4, 4, 32, tma=True),
        Tile(4, 3, 64, tma=True),
        Tile(8, 3, 128, tma=True),
    ),
}
for _kernel in ("scan_kept", "scan_backward", "scan_both"):
    CHANNEL_SCANS[_kernel, "sm_90"] = (
        Tile(4, 3, 16, tma=True),
        Tile(4, 3, 32, tma=True),
        Tile(4, 2, 64, tma=True),
        Tile(8, 2, 128, tma=True),
    )
for _kernel in ("scan", "scan_kept", "scan_backward", "scan_both"):
    CHANNEL_SCANS[_kernel, "sm_100"] = (Tile(4, 2, 32, tma=True), Tile(8, 2, 64, tma=True))


# Of decoding, by ``state_v_first`` and the bytes of a number in the pool, for K up to 64, up to 128 and up to 256. With
# values first the rows of a tile are a warp's, which has no barrier to wait at; with keys first, whole lines decide.
# Measured on an H200 with 64 and with 256 rows (docs/notes).
DECODE = {
    (True, 4): (Tile(1, 1, 8), Tile(1, 1, 8), Tile(1, 1, 4)),
    (True, 2): (Tile(1, 1, 16), Tile(1, 1, 8), Tile(1, 1, 4)),
    (False, 4): (Tile(2, 1, 32), Tile(4, 1, 64), Tile(4, 1, 16)),
    (False, 2): (Tile(2, 1, 32), Tile(1, 1, 32), Tile(1, 1, 16)),
}


def decode_tile(p: Problem, chip: Chip) -> Tile:
    if not p.taps and p.eps is None:
        return DECODE[p.state_v_first, p.pool.itemsize][(p.K > 64) + (p.K > 128)]
    K, V = (max(16, next_power_of_2(width)) for width in (p.K, p.V))  # a head's whole state in one program
    return Tile(min(8, max(1, K * V // 1024)), 1, V, registers=128 if family(chip.target) == "sm_90" else None)


def tile(kernel: str, p: Problem, chip: Chip) -> Tile:
    return _tile(kernel, chip.target, p.dtype, p.K, p.V)


def scan_tiles(kernel: str, p: Problem, chip: Chip, every: bool) -> tuple[Tile, ...]:
    """The narrowest tile with which all programs run at once; ``every``: all that other batch sizes may choose.

    "scan_kept" is the scan that writes both the output and what the backward pass needs (``disable_recompute``),
    "scan_both" the backward scan beside which the forward one runs again. For batch invariance the tile is that of a
    sequence alone: a long prompt has most to lose.
    """
    if p.batch_invariant:
        p, every = p._replace(N=1), False
    states = p.N * p.HV * (2 if kernel == "scan_both" else 1)
    return _scan_tiles(kernel, p.gate == "channel", chip, p.dtype, p.K, p.V, 0 if every else max(1, states))


# Every launch asks: a remembered answer takes 0.3 us.


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
    """``states``: those that walk at once; 0: any number."""
    choices = (CHANNEL_SCANS if channel else SCANS).get((kernel, family(chip.target)))
    if choices is None or dtype == torch.float32 or max(K, V) > 128:
        name = {"scan_kept": "scan", "scan_both": "scan_backward"}.get(kernel, kernel)
        return (_tile(name, chip.target, dtype, K, V),)
    choices = tuple(t for t in choices if t.BV < 2 * V) or choices[:1]
    if not states:
        return choices
    return (next((t for t in choices if states * -(-V // t.BV) <= chip.processors), choices[-1]),)
