"""How kernels are launched: compiled once, all at a time, and from then on with little host time.

Triton looks at every argument of every launch, which takes some 50 us of host time for a kernel of forty. What a kernel was
compiled for depends on less: dtypes, strides, alignments and the constants. They are looked at once per call of an op
(`Call.signature`); a kernel known by them is launched directly.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_delta.kernels.triton.chunk import count_slots
from flash_delta.kernels.triton.tiles import Chip, Tile, chip_of
from flash_delta.problem import Inputs, Problem


class Call(NamedTuple):
    """One call of an op, forward or backward, as the launchers take it."""

    p: Problem
    x: Inputs
    keys: Tensor  # that erase: p, or k
    slots: int
    chip: Chip
    signature: tuple  # what compiled code depends on, of all tensors of the caller
    compiling: bool = False  # launchers only compile, with every tile that other sizes may choose


def make_call(p: Problem, x: Inputs, *more: Tensor | None) -> Call:
    """``more``: other tensors that do not come from this backend."""
    signature = (p.device, *map(_specialisation, (*x, *more)))
    return Call(p, x, x.k if x.p is None else x.p, count_slots(p), chip_of(p.device), signature)


def _specialisation(t: Tensor | None) -> tuple | None:
    """What Triton compiles for: of a batch row's stride, which depends on T, only whether it is aligned and fits 32 bits."""
    if t is None:
        return None
    strides = t.stride()
    batch = strides[0] if strides else 0
    return t.dtype, strides[1:], batch % 16 == 0, batch < 2**31, t.data_ptr() % 16 == 0


_compiled: dict[tuple, Any] = {}
_ready: set[tuple] = set()


def launch(
    c: Call, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any], tile: Tile
) -> None:
    """``args`` and then ``constants`` are the kernel's parameters, in their order."""
    if 0 in grid:
        return
    if c.p.device.type != "cuda":  # the interpreter, or the compile gate
        kernel[grid](*args, **constants, **_options(tile))
        return
    if tile.tma:
        triton.set_allocator(_scratch)  # a thread's own setting, and the backward pass has a thread of its own
    key = (kernel, c.signature, tile, *constants.values())
    known = _compiled.get(key)
    if c.compiling:
        if known is None:
            kernel.warmup(*args, grid=grid, **constants, **_options(tile))
    elif known is None:
        _compiled[key] = kernel[grid](*args, **constants, **_options(tile))
    else:
        known[grid](*args, *constants.values())


def run(c: Call, kind: tuple, kernels: Callable[[Call], None]) -> None:
    """Calls ``kernels``, which launches; before its first time all that it can ever launch is compiled in parallel."""
    if c.p.device.type == "cuda" and (c.signature, kind) not in _ready:
        with _compile_in_parallel():
            kernels(c._replace(compiling=True))
        _ready.add((c.signature, kind))
    kernels(c)


@contextmanager
def _compile_in_parallel() -> Iterator[None]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads, triton.AsyncCompileMode(threads):
        yield


def _options(t: Tile) -> dict[str, int | bool]:
    """What Triton takes beside a kernel's parameters; AMD's compiler does not know ``maxnreg``."""
    chosen = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": True}
    return chosen if t.registers is None else chosen | {"maxnreg": t.registers}


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where descriptors lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
