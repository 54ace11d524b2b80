"""The launch numbers of the kernels: one table row per kernel and kind of chip, from measurements or the compile gate.

H200 rows were measured (docs/notes); the others are the largest tiles that compile without a spill and within a chip's shared
memory (``flash-delta compile``).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.runtime.driver import driver

from flash_delta.problem import Problem


class Tile(NamedTuple):
    warps: int
    stages: int
    BV: int = 0  # value columns of one program, or of one step of its loop
    BC: int = 64  # tokens of one step of a loop over a chunk
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


# Blocks of value columns, the narrowest first: more programs for few heads, less traffic for many.
SCANS = {
    ("scan", "sm_90"): (Tile(4, 4, 32, tma=True), Tile(4, 3, 64, tma=True), Tile(8, 3, 128, tma=True)),
    ("scan_backward", "sm_90"): (Tile(4, 4, 32, tma=True), Tile(4, 3, 64, tma=True), Tile(8, 2, 128, tma=True)),
    ("scan", "sm_100"): (Tile(8, 3, 64, tma=True), Tile(8, 3, 128, tma=True)),
    ("scan_backward", "sm_100"): (Tile(8, 3, 64, tma=True), Tile(8, 3, 128, tma=True)),
}


def scan_tiles(kernel: str, p: Problem, chip: Chip, every: bool) -> tuple[Tile, ...]:
    """The narrowest tile with which all programs run at once; ``every``: all that other batch sizes may choose."""
    choices = SCANS.get((kernel, chip.target))
    if choices is None or p.dtype == torch.float32 or max(p.K, p.V) > 128:
        return (Tile(4, 1 if chip.target.startswith("gfx") else 2, 32),)
    if every:
        return choices
    return (next((t for t in choices if p.N * p.HV * -(-p.V // t.BV) <= chip.processors), choices[-1]),)


def tile(kernel: str, p: Problem, chip: Chip) -> Tile:
    return {
        "solve": Tile(1, 1),
        "factor": Tile(4, 1, registers=168),
        "pairs": Tile(4, 1, 128),
        "query_gradients": Tile(4, 2, 64),
        "key_gradients": Tile(4, 2, 64),
        "gates": Tile(1, 1),
    }[kernel]
