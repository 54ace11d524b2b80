"""How kernels are launched: compiled once, all at a time, and from then on with little host time.

Triton looks at every argument of every launch, which takes 50 us of host time for a kernel of forty. What a kernel was
compiled for depends on less: dtypes, strides and alignments of the caller's tensors, and flags of the problem. They are
looked at once per call of an op (`make_call`); a kernel known by them is launched directly.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

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
    key: int  # of what compiled code depends on
    stream: int  # CUDA's
    hooked: bool  # a profiler has hooks in Triton's own launcher, which then is to launch
    compiling: bool = False  # launchers only compile, with every tile that other sizes may choose


class Compiled(NamedTuple):
    kernel: Any
    constants: tuple[Any, ...]  # their values, which Triton wants to see behind the arguments


_compiled: dict[tuple, Compiled] = {}
_keys: dict[tuple, int] = {}  # numbers for what takes long to compare
_ready: set[int] = set()


def make_call(p: Problem, x: Inputs, kind: tuple, *more: Tensor | None) -> Call:
    """``kind`` tells the kernels of forward and backward apart; ``more``: other tensors that come from outside."""
    key = (
        kind, p.device, p.H, p.HV, p.K, p.V, p.gate, p.erase, p.packed, p.l2norm, p.raw_gate, p.raw_beta,
        p.state_v_first,
        *(None if t is None else _specialisation(t) for t in (*x, *more)),
    )  # fmt: skip
    short = _keys.setdefault(key, len(_keys))
    stream, hooked = 0, False
    if p.device.type == "cuda":
        stream, hooked = driver.active.get_current_stream(p.device.index), bool(knobs.runtime.launch_enter_hook.calls)
    return Call(p, x, x.k if x.p is None else x.p, count_slots(p), chip_of(p.device), short, stream, hooked)


def _specialisation(t: Tensor) -> tuple:
    """What Triton compiles for; of a batch row's stride, which depends on T, alignment and whether 32 bits hold it."""
    batch, *strides = t.stride() or (0,)
    return t.dtype, *strides, batch % 16, batch < 2**31, t.data_ptr() % 16


def run(c: Call, kernels: Callable[[Call], None]) -> None:
    """Calls ``kernels``, which launches; before its first time all that it can ever launch is compiled in parallel."""
    if c.key not in _ready and c.p.device.type == "cuda":
        with _compile_in_parallel():
            kernels(c._replace(compiling=True))
        _ready.add(c.key)
    kernels(c)


@contextmanager
def _compile_in_parallel() -> Iterator[None]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads, triton.AsyncCompileMode(threads):
        yield


def launch(
    c: Call,
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    tile: Tile,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """``args`` and then ``constants`` are the kernel's parameters, in their order."""
    if 0 in grid:
        return
    key = (id(kernel), c.key, tile)
    known = _compiled.get(key)
    if known is None or c.hooked:
        named = constants()
        if c.compiling:
            kernel.warmup(*args, grid=grid, **named, **_options(tile))
            return
        if tile.tma:
            triton.set_allocator(_scratch)
        compiled = kernel[grid](*args, **named, **_options(tile))
        if c.p.device.type == "cuda":  # else the interpreter, or the compile gate
            _compiled[key] = Compiled(compiled, tuple(named.values()))
    elif not c.compiling:
        if tile.tma:
            triton.set_allocator(_scratch)  # a thread's own setting, and the backward pass has a thread of its own
        compiled, values = known
        # Addresses as numbers: of a tensor's, Triton asks the driver each time where it lies, which takes 1 us.
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        metadata = compiled.packed_metadata
        compiled.run(*grid, c.stream, compiled.function, metadata, None, None, None, *numbers, *values)


def _options(t: Tile) -> dict[str, int | bool]:
    """What Triton takes beside a kernel's parameters; AMD's compiler does not know ``maxnreg``."""
    chosen = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": True}
    return chosen if t.registers is None else chosen | {"maxnreg": t.registers}


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where descriptors lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
