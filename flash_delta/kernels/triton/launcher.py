"""How kernels are launched: compiled once, all at a time, and from then on with little host time.

Triton looks at every argument of every launch, which takes 50 us of host time for a kernel of forty. What a kernel was
compiled for depends on less: dtypes, strides and alignments of the caller's tensors, and flags of the problem. They are
looked at once per call of an op (`make_call`); a kernel known by them is launched directly.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from flash_delta.kernels.triton.chunk import count_slots
from flash_delta.kernels.triton.tiles import Chip, Tile, chip_of
from flash_delta.kernels.triton.workspace import Workspace
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
    direct: bool  # launched with addresses, past Triton's own launcher
    compiling: dict | None = None  # if there, launchers only compile, for it, every tile that other sizes may choose

    def parts(self, *memory: Workspace) -> list[Any]:
        """All their groups of tensors, as this call's launches take them."""
        return [group for w in memory for group in (w.addresses() if self.direct else w.views())]


class Compiled(NamedTuple):
    kernel: Any  # Triton's, or its future
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
    stream, direct = 0, False
    if p.device.type == "cuda":
        stream = driver.active.get_current_stream(p.device.index)
        direct = not knobs.runtime.launch_enter_hook.calls  # a profiler's, which Triton's own launcher calls
    return Call(p, x, x.k if x.p is None else x.p, count_slots(p), chip_of(p.device), short, stream, direct)


def _specialisation(t: Tensor) -> tuple:
    """What Triton compiles for; of a batch row's stride, which depends on T, alignment and whether 32 bits hold it."""
    batch, *strides = t.stride() or (0,)
    return t.dtype, *strides, batch % 16, batch < 2**31, t.data_ptr() % 16


def run(c: Call, kernels: Callable[[Call], None]) -> None:
    """Calls ``kernels``, which launches; before its first time all that it can ever launch is compiled in parallel."""
    if c.direct and c.key not in _ready:
        found: dict[tuple, Compiled] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads, triton.AsyncCompileMode(threads):
            kernels(c._replace(direct=False, compiling=found))
        for key, (kernel, values) in found.items():
            _compiled[key] = Compiled(kernel.result() if hasattr(kernel, "result") else kernel, values)
        _ready.add(c.key)
    kernels(c)


def launch(
    c: Call,
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    tile: Tile,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """``args`` and then ``constants`` are the kernel's parameters, in their order."""
    if c.compiling is not None:
        named = constants()
        compiled = kernel.warmup(*args, grid=grid, **named, **_options(tile))
        c.compiling[id(kernel), c.key, tile] = Compiled(compiled, tuple(named.values()))
        return
    if 0 in grid:
        return
    if tile.tma:
        triton.set_allocator(_scratch)  # a thread's own setting, and the backward pass has a thread of its own
    if not c.direct:
        kernel[grid](*args, **constants(), **_options(tile))
        return
    compiled, values = _compiled[id(kernel), c.key, tile]
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
