"""How kernels are launched: compiled once, all at a time, and from then on with little host time.

Triton looks at every argument of every launch, which takes 50 us of host time for a kernel of forty. What a kernel was
compiled for, and all its arguments but the addresses, depend on less: dtypes, strides and alignments of the caller's
tensors, sizes and flags of the problem. They are looked at once per call of an op (`make_call`); what is known of calls
like it is used again.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from flash_delta.kernels.triton.tiles import Chip, Tile, chip_of
from flash_delta.kernels.triton.workspace import Workspace
from flash_delta.problem import Inputs, Problem


class Plan(NamedTuple):
    """One launch, but for the tensors."""

    grid: tuple[int, int, int]
    tile: Tile
    scalars: tuple[Any, ...]  # the parameters behind the pointers
    constants: dict[str, Any]  # the constexprs
    follows: bool  # the kernel launched before it is this call's, too, and may still run (chunk.follow)


class Known(NamedTuple):
    """A launch that was made before, as the driver takes it."""

    run: Any
    function: int
    metadata: Any
    grid: tuple[int, int, int]
    tma: bool
    rest: tuple[Any, ...]  # all arguments behind the pointers


class Shape(NamedTuple):
    """What calls of the same sizes, strides, alignments and flags have in common."""

    key: int  # of what compiled code depends on
    chip: Chip
    known: dict[int, Known]  # by kernel


class Call(NamedTuple):
    """One call of an op, forward or backward, as the launchers take it."""

    p: Problem
    x: Inputs
    keys: Tensor  # that erase: p, or k
    shape: Shape
    stream: int  # CUDA's
    direct: bool  # launched with addresses, past Triton's own launcher
    compiling: dict | None = None  # if there, launchers only compile, for it, every tile that other sizes may choose

    def parts(self, *memory: Workspace) -> list[Any]:
        """All their groups of tensors, as this call's launches take them."""
        return [group for w in memory for group in (w.addresses() if self.direct else w.views())]


_compiled: dict[tuple, Any] = {}  # by kernel, key and tile
_keys: dict[tuple, int] = {}
_ready: set[int] = set()


def make_call(p: Problem, x: Inputs, kind: tuple, *more: Tensor | None) -> Call:
    """``kind`` tells the kernels of forward and backward apart; ``more``: other tensors that come from outside."""
    shape = _shape(
        chip_of(p.device),
        (
            kind, p.device, p.H, p.HV, p.K, p.V, p.gate, p.erase, p.packed, p.l2norm, p.raw_gate, p.raw_beta,
            p.state_v_first,
        ),
        (p.N, p.T, p.scale, p.beta_range),
        *[None if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in (*x, *more)],
    )  # fmt: skip
    stream, direct = 0, False
    if p.device.type == "cuda":
        stream = driver.active.get_current_stream(p.device.index)
        direct = not knobs.runtime.launch_enter_hook.calls  # a profiler's, which Triton's own launcher calls
    return Call(p, x, x.k if x.p is None else x.p, shape, stream, direct)


@lru_cache(maxsize=1024)
def _shape(chip: Chip, flags: tuple, sizes: tuple, *tensors: tuple | None) -> Shape:
    """``sizes`` change what is launched, not what is compiled for it."""
    key = (flags, *(None if t is None else _specialisation(*t) for t in tensors))
    return Shape(_keys.setdefault(key, len(_keys)), chip, {})


def _specialisation(dtype: torch.dtype, strides: tuple[int, ...], alignment: int) -> tuple:
    """What Triton compiles for; of a batch row's stride, which depends on T, alignment and whether 32 bits hold it."""
    batch, *others = strides or (0,)
    return dtype, *others, batch % 16, batch < 2**31, alignment


def run(c: Call, kernels: Callable[[Call], None]) -> None:
    """Calls ``kernels``, which launches; before its first time all that it can ever launch is compiled in parallel."""
    if c.direct and c.shape.key not in _ready:
        found: dict[tuple, Any] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads, triton.AsyncCompileMode(threads):
            kernels(c._replace(direct=False, compiling=found))
        for key, kernel in found.items():
            _compiled[key] = kernel.result() if hasattr(kernel, "result") else kernel
        _ready.add(c.shape.key)
    kernels(c)


def launch(c: Call, kernel: Any, pointers: tuple[Any, ...], plans: Callable[[], Iterable[Plan]]) -> None:
    """``pointers``, a plan's scalars and its constants are the kernel's parameters, in their order.

    Of the ``plans`` there is one, but while compiling.
    """
    if c.direct:
        known = c.shape.known.get(id(kernel))
        if known is None:
            known = c.shape.known[id(kernel)] = _know(c, kernel, *plans())
        if known.tma:
            triton.set_allocator(_scratch)  # a thread's own setting, and the backward pass has a thread of its own
        if 0 not in known.grid:
            # Addresses as numbers: of a tensor's, Triton asks the driver each time where it lies, which takes 1 us.
            numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in pointers]
            known.run(
                *known.grid, c.stream, known.function, known.metadata, None, None, None, *numbers, *known.rest
            )  # fmt: skip
        return
    for plan in plans():
        options = plan.constants | _options(plan)
        if c.compiling is not None:
            compiled = kernel.warmup(*pointers, *plan.scalars, grid=plan.grid, **options)
            c.compiling[id(kernel), c.shape.key, plan.tile] = compiled
        elif 0 not in plan.grid:
            if plan.tile.tma:
                triton.set_allocator(_scratch)
            kernel[plan.grid](*pointers, *plan.scalars, **options)


def _know(c: Call, kernel: Any, plan: Plan) -> Known:
    compiled = _compiled[id(kernel), c.shape.key, plan.tile]
    run = compiled.run  # loads it
    rest = (*plan.scalars, *plan.constants.values())
    return Known(run, compiled.function, compiled.packed_metadata, plan.grid, plan.tile.tma, rest)


def _options(plan: Plan) -> dict[str, int | bool]:
    """What Triton takes beside a kernel's parameters; AMD's compiler does not know the last two."""
    t = plan.tile
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": True}
    if t.registers is not None:
        options["maxnreg"] = t.registers
    if plan.follows:
        options["launch_pdl"] = True
    return options


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where descriptors lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
