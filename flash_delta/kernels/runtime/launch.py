"""Compiles kernels in parallel, and launches them by Triton's launcher.

That launcher looks at every argument of every launch, which takes 50 us of host time for a kernel with forty arguments.
So calls on NVIDIA's GPUs use it only if a profiler watches them (run.py, cuda_driver.py).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime._allocation import NullAllocator, _allocator

from flash_delta.kernels.runtime import fastcall
from flash_delta.kernels.runtime.plan import Step
from flash_delta.kernels.runtime.profiling import tell
from flash_delta.kernels.runtime.together import compile_together
from flash_delta.kernels.runtime.turns import taking_turns

compiling = RLock()


def compile_all(wanted: dict[tuple, partial]) -> dict[tuple, Any]:
    """Compiles kernels in parallel. The slowest ones come first."""
    names = sorted(wanted, key=lambda name: _size(wanted[name]), reverse=True)
    with taking_turns():
        found = compile_together([wanted[name] for name in names], beside=_load)
    return dict(zip(names, found, strict=True))


def _load() -> None:
    """Loads the C module, which takes as long as to compile a small kernel."""
    if fastcall.API is not None:
        fastcall.load()


def _size(compile_it: partial) -> tuple[int, int]:
    """A rough measure of how long LLVM and ptxas take: the number of descriptors, and then the length of the source.
    Only hand-written kernels have descriptors, and a form of a kernel with more of them has more code
    (docs/notes/2026-11-25-first-call.md)."""
    described = sum(isinstance(value, TensorDescriptor) for value in compile_it.args)
    return described, len(compile_it.func.__self__.src)


def launch_by_triton(step: Step, arguments: tuple[Any, ...]) -> None:
    """``arguments``: those of the step, with tensors."""
    step.kernel.launch_metadata = tell
    with memory_for_descriptors() if step.tile.tma else nullcontext():
        step.kernel[step.grid](*arguments, **step.constants, **options_of(step))


@contextmanager
def memory_for_descriptors() -> Iterator[None]:
    """A context in which Triton has an allocator. If the caller has set one, it is the caller's."""
    if not isinstance(_allocator.get(), NullAllocator):
        yield
        return
    before = _allocator.set(_scratch)
    try:
        yield
    finally:
        _allocator.reset(before)


def options_of(step: Step) -> dict[str, int | bool]:
    """Triton's options for a launch. AMD's compiler does not have the last two."""
    t = step.tile
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": step.contracts}
    if t.registers is not None:
        options["maxnreg"] = t.registers
    if step.follows:
        options["launch_pdl"] = True
    return options


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@lru_cache(None)
def several_devices() -> bool:
    return torch.cuda.device_count() > 1


def is_direct(device: torch.device) -> bool:
    """Whether to launch without Triton's launcher. AMD's GPUs and an older torch need Triton's launcher."""
    return device.type == "cuda" and torch.version.hip is None and fastcall.API is not None and not profiled()


def profiled() -> bool:
    """Whether a profiler watches launches, or kernels are instrumented. Both need Triton's launcher."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.compilation.instrumentation_mode)


def on(device: torch.device) -> AbstractContextManager:
    """A context in which ``device`` is the current device, on which Triton launches."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
