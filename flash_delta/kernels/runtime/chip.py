"""The chip that kernels are compiled for, and the launch numbers of one kernel."""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.runtime.driver import driver

from flash_delta.problem import Problem

CPU = torch.device("cpu")  # comparing with it takes a tenth of the time of `device.type`
MOST_PROGRAMS = 65_535  # along the second and the third axis of a grid, on any GPU


class Tile(NamedTuple):
    warps: int
    stages: int
    BV: int = 0  # value columns of a program, or of a step of its loop; in channel_gradients key channels
    tma: bool = False  # the copy engine moves whole tiles, if the tensors allow it (arguments.fits_tma)
    registers: int | None = None  # the most registers per thread

    def __str__(self) -> str:
        columns = f", {self.BV} columns" if self.BV else ""
        return f"{self.warps} warps, {self.stages} stages{columns}{', by the copy engine' if self.tma else ''}"


class Chip(NamedTuple):
    target: str  # "sm_90", "gfx942"; "interpreter" on the CPU
    processors: int  # multiprocessors


def chip_of(device: torch.device) -> Chip:
    """The chip that kernels on ``device`` are compiled for."""
    if device.index is not None:  # a GPU; this test comes first because it takes a tenth of the time of `device.type`
        return _chip(device.index)
    if device == CPU:
        return Chip("interpreter", 1)
    if device.type == "meta":  # the compile gate uses it (compiler/offline.py)
        target = driver.active.get_current_target()
        return Chip(target.arch if target.backend == "hip" else f"sm_{target.arch}", 1)
    return _chip(device.index)


@lru_cache
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return Chip(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
    return Chip(properties.gcnArchName.split(":")[0], properties.multi_processor_count)


def precision(dtype: torch.dtype, chip: Chip) -> str:
    """The input precision of float32 products in a call in ``dtype``. AMD's matrix cores compute in float32."""
    if chip.target.startswith("gfx") or chip.target == "interpreter":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


COMPILED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")  # see compiler/targets.py


def unknown(chip: Chip) -> str | None:
    """A remark about a chip that no kernel was ever compiled for, or None."""
    if chip.target in (*COMPILED, "interpreter"):
        return None
    return f"{chip.target} is new to these kernels, which take their tiles for {family(chip.target)}"


def family(target: str) -> str:
    """The chip in the tables of tiles that is most similar to ``target`` in matrix instructions and shared memory.

    An unknown chip gets the smallest tiles: those for ``sm_80`` fit into 99 KB, those for ``gfx942`` into 64 KB.
    """
    if target.startswith("gfx"):
        return "gfx942"
    return {"sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}.get(target, "sm_80")  # also for consumer chips


def overlaps(p: Problem, chip: Chip) -> bool:
    """Whether a kernel may start before the previous one has ended (chunk.follow). It may not in float32."""
    hopper_or_later = family(chip.target) in ("sm_90", "sm_100") or chip.target.startswith("sm_12")
    return hopper_or_later and p.dtype != torch.float32


def takes_tma(chip: Chip) -> bool:
    """Whether the table has tiles for the chip's copy engine."""
    return family(chip.target) in ("sm_90", "sm_100")


def next_power_of_2(n: int) -> int:
    """The next power of 2. Triton's function takes 5 us."""
    return 1 << (n - 1).bit_length()
