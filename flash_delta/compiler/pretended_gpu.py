"""A GPU that is none: tensors say that they lie on it, kernels count as compiled, and the driver is fake_cuda.c.

What a call takes of the host is all real: checks, keys, plans, and what is handed to the driver. To be used in a
process in which nothing interprets kernels.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from flash_delta.kernels.runtime import chip, cuda_driver, run
from flash_delta.ops import _known_calls

DEVICE, META, STREAM = torch.device("cuda", 0), torch.device("meta"), 77
H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
kept: list[Any] = []  # as long as there may be launches
numbers = count(1000)  # of GPUs, which have caches of their own


def fake_driver(place: Path) -> ctypes.CDLL:
    """Compiled in ``place``, unless it is there; whoever asks for libcuda.so.1 from now on finds it."""
    source, library = Path(__file__).with_name("fake_cuda.c"), place / "libcuda.so.1"
    if not library.exists():
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path, knobs.cache.dir = str(place), str(place / "cache")
    for cached in (nvidia.libcuda_dirs, nvidia.library_dirs, cuda_driver.library):
        cached.cache_clear()
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    driver._active = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda index: STREAM
    )
    driver._active.utils = nvidia.CudaUtils()
    return loaded


@contextmanager
def pretended_gpu(place: Path, gpu: Any = H200) -> Iterator[ctypes.CDLL]:
    """Every tensor says that it is on a GPU, unless it is on "meta". ``gpu``: its properties."""

    def here(new: Callable[..., Tensor], *sizes: Any, device: Any = None, **options: Any) -> Tensor:
        return new(*sizes, device=device if str(device) == "meta" else None, **options)

    with ExitStack() as stack, knobs.nvidia.scope(), knobs.cache.scope(), patch.object(driver, "_active", None):
        loaded = fake_driver(place)
        for where, name, stand_in in (
            (torch.Tensor, "is_cuda", property(lambda t: not t.is_meta)),
            (torch.Tensor, "device", property(lambda t: META if t.is_meta else DEVICE)),
            (torch, "empty", partial(here, torch.empty)),
            (torch, "empty_strided", partial(here, torch.empty_strided)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "get_device_properties", lambda index: gpu),
            (JITFunction, "warmup", compiled),
            (cuda_driver, "load", lambda kernel, compiled: compiled.function),
            (cuda_driver, "stream_of", lambda index: STREAM),
        ):
            stack.enter_context(patch.object(where, name, stand_in, create=True))
        chip._chip.cache_clear()
        stack.callback(chip._chip.cache_clear)
        yield loaded


@contextmanager
def pretended_compiler(place: Path) -> Iterator[list[str]]:
    """A pretended GPU of its own, for which Triton decides as ever what has to be compiled. Yields the names of the
    kernels that would have been."""
    names: list[str] = []
    number, decided = next(numbers), JITFunction._do_compile

    def warm_up(kernel: JITFunction, *values: Any, grid: Any, **options: Any) -> Any:
        kernel.run(*values, grid=grid, warmup=True, **options)  # raises what a hook raises
        return compiled(kernel, *values, grid=grid, **options)

    def note(kernel: JITFunction, key: str, *facts: Any, **more: Any) -> str:
        view = copy(kernel)  # of which Triton takes its hooks, and this in place of its compiler
        view.compile = lambda source, **options: key
        decided(view, key, *facts, **more)  # raises what a hook raises
        names.append(kernel.__name__)
        return key

    with (
        pretended_gpu(place),
        patch.object(JITFunction, "warmup", warm_up),
        patch.object(JITFunction, "_do_compile", note),
        patch.object(driver._active, "get_current_device", lambda: number),
        patch.object(run, "compiled", {}),
        patch.object(_known_calls, "calls", _known_calls.Remembered()),
    ):
        yield names


class Compiled(SimpleNamespace):
    __hash__ = object.__hash__


def compiled(kernel: JITFunction, *values: Any, grid: Any, **options: Any) -> Any:
    """Returns ``kernel`` as if it had been compiled for these arguments."""
    given = dict(zip(kernel.arg_names, values, strict=False)) | options
    constant = {p.name for p in kernel.params if p.is_constexpr}
    signature = {
        name: "constexpr" if name in constant else type_of(given[name]) for name in kernel.arg_names if name in given
    }
    described = [
        {"swizzle": 3, "elem_size": t.base.element_size(), "elem_type": 10, "fp4_padded": False,
         "block_size": list(t.block_shape)}
        for t in given.values() if isinstance(t, TensorDescriptor)
    ]  # fmt: skip
    sizes = [8] * 200
    function = (ctypes.c_uint64 * 2)(0)
    kept.append((function, sizes))
    metadata = SimpleNamespace(
        num_warps=4, shared=4096, launch_pdl=False, tensordesc_meta=described, global_scratch_size=0
    )
    return Compiled(
        src=SimpleNamespace(signature=signature), metadata=metadata, function=ctypes.addressof(function),
        name=kernel.__name__,
    )  # fmt: skip


def type_of(value: Any) -> Any:
    match value:
        case None | tl.constexpr():
            return "constexpr"
        case bool():
            return "i1"
        case int():
            return "i32" if abs(value) < 2**31 else "i64"
        case float():
            return "fp32"
        case tuple():
            return tuple(map(type_of, value))
        case TensorDescriptor():
            return "tensordesc"
        case _:
            return "*i8"
