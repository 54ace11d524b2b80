"""Launches directly on NVIDIA's driver. Parameters are built once in memory, and a call only writes addresses there (in
C, fastcall/frame.c).

Triton's launcher does more at every launch. It converts every argument, which takes 7 us of host time for the 76 of
`decode`, and makes new descriptors for the copy engine. Up to Triton 3.6 it is also a separate C source for every
kernel, compiled at its first use.

Kernels get the same parameters here: all in their order, without constants, and then Triton's two scratch pointers.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from struct import pack
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.runtime.errors import OutOfResources

from flash_delta.kernels.runtime import fastcall

AXES = 5  # the most of a descriptor
LETTERS = {  # letters of `struct`, by Triton's names of types
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d", "constexpr": "x",
}  # fmt: skip
SHARED_BY_DEFAULT = 48 * 1024  # bytes; a kernel has to ask for more
MAX_THREADS, SHARED_SIZE, MAX_DYNAMIC_SHARED_SIZE = 0, 1, 8  # CU_FUNC_ATTRIBUTE_...
MAX_SHARED_MEMORY = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of a device's number; torch for CPUs has none
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread that has not used CUDA yet has none
_thread = local()  # it has `has_context` once `ensure_context` has looked


class Kernel(NamedTuple):
    """A compiled kernel."""

    name: str
    function: int  # the driver's handle
    threads: int
    shared: int  # bytes
    overlaps: bool  # it may start before the previous launch has ended
    scratch: int  # bytes of scratch memory per program
    letters: bytes  # a letter for the type of each parameter (build.c)
    tiles: bytes  # those of each descriptor (describe.c)


class BoundStep(NamedTuple):
    """A step with its kernel and the values of its parameters, from which a frame is made."""

    kernel: Kernel
    grid: tuple[int, int, int]
    values: tuple[Any, ...]  # of parameters, as of `places` in C: a pointer is (number of a tensor, offset in bytes)


@lru_cache(None)
def kernel_of(compiled: Any) -> Kernel:
    """A kernel that Triton has compiled, loaded on the current device."""
    kernel = facts_of(compiled)
    return kernel._replace(function=load(kernel, compiled))


def facts_of(compiled: Any) -> Kernel:
    """The kernel, not loaded."""
    m = compiled.metadata
    metas = m.tensordesc_meta or ()
    described = iter(metas)
    letters = "".join(_letters(kind, described) for kind in compiled.src.signature.values())
    return Kernel(
        compiled.name, 0, 32 * m.num_warps, m.shared, m.launch_pdl, m.global_scratch_size, f"({letters})".encode(),
        b"".join(map(_tiles, metas)),
    )  # fmt: skip


def _letters(kind: str | tuple, described: Iterator[dict]) -> str:
    if isinstance(kind, tuple):
        return f"({''.join(_letters(k, described) for k in kind)})"
    if kind.startswith("*"):
        return "P"
    if kind.startswith("tensordesc"):
        axes = len(next(described)["block_size"])
        return f"M{axes * 'i'}){axes * 'q'})"
    return LETTERS[kind]


def _tiles(meta: dict[str, Any]) -> bytes:
    """What a compiled kernel says about the tiles of one descriptor."""
    box = meta["block_size"][::-1]
    dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return pack("9I", dtype, meta["elem_size"], meta["swizzle"], len(box), *box, *[1] * (AXES - len(box)))


def load(kernel: Kernel, compiled: Any) -> int:
    return load_code(kernel, compiled.kernel)


def load_code(kernel: Kernel, code: bytes) -> int:
    """The driver's handle of a kernel, in the current context. Triton also gets it like this, but then makes its
    launcher, too."""
    cuda, module, function = library(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), code), f"load {kernel.name}")
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), f"find {kernel.name}")
    most = _attribute(function, MAX_THREADS)
    if kernel.threads > most:
        raise OutOfResources(kernel.threads, most, "threads")
    if kernel.shared > SHARED_BY_DEFAULT:
        device, most = ctypes.c_int(), ctypes.c_int()
        _check(cuda.cuCtxGetDevice(ctypes.byref(device)), "find the context's device")
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(most), MAX_SHARED_MEMORY, device), "ask for the shared memory")
        if kernel.shared > most.value:
            raise OutOfResources(kernel.shared, most.value, "shared memory")
        _check(cuda.cuFuncSetCacheConfig(function, PREFER_SHARED), "prefer shared memory")
        dynamic = most.value - _attribute(function, SHARED_SIZE)
        _check(cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, dynamic), "allow shared memory")
    return function.value


def _attribute(function: ctypes.c_void_p, number: int) -> int:
    found = ctypes.c_int()
    _check(library().cuFuncGetAttribute(ctypes.byref(found), number, function), "ask about a kernel")
    return found.value


class Replay:
    """Repeats a call's launches.

    ``tensors``: how many the call has. The last of them may be spare, which means that only the call's kernels use
    them. ``spare``: how much memory these take, and their places in it. Scratch memory is one more spare tensor. All
    launches share it, since a launch's scratch memory is free when the next one is launched (chunk.follow).
    ``address``: of any tensor. The driver does not describe one at address 0, so descriptors have it until the launch.

    There may be one such object for each length, so it holds few objects that Python's garbage collector visits. The
    driver reads launches from bytes (`frames`). It reads them only during the launch, so afterwards they can be written
    again or freed.
    """

    __slots__ = ("frames", "has_places", "names", "size", "start", "stream_of", "template")

    def __init__(
        self, steps: Sequence[BoundStep], tensors: int, spare: tuple[int, tuple[int, ...]] = (0, ()), address: int = 0
    ):
        scratch = max((prod(step.grid) * step.kernel.scratch for step in steps), default=0)
        size, places = spare
        if scratch:
            places = *places, size
        self.size, self.has_places = size + scratch, bool(places)
        self.names = tuple(step.kernel.name for step in steps)
        c = fastcall.load()
        self.start, self.stream_of = c.launch, stream_of
        self.template = c.frame(*_driven(library()), tuple(steps), tensors, places, scratch > 0, address)
        self.frames = [self.template]  # frames that no thread uses; while one thread launches, others may run

    def launch(self, device: torch.device, *groups: tuple[Tensor | None, ...]) -> None:
        """``groups``: all tensors of the call but the spare ones."""
        memory = torch.empty(self.size, dtype=torch.uint8, device=device) if self.has_places else None
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = fastcall.load().copy(self.template)
        status = self.start(frame, self.stream_of(device.index), memory, *groups)
        if status:
            self.recover(status, frame, device, memory, *groups)
        self.frames.append(frame)

    def recover(self, status: int, frame: bytearray, device: torch.device, *given: Any) -> None:
        """Launches again if only the thread had no context. Otherwise raises the driver's error."""
        if status == INVALID_CONTEXT:
            make_current(device)
            status = self.start(frame, self.stream_of(device.index), *given)
        if status:
            done = fastcall.load().done(frame)
            _check(status, "describe a tensor" if done < 0 else f"launch {self.names[done]}")


@lru_cache(1)
def _driven(library: ctypes.CDLL) -> tuple[int, ...]:
    """The addresses of the driver's functions that launch a kernel, move a descriptor and make one."""
    functions = library.cuLaunchKernelEx, library.cuTensorMapReplaceAddress, library.cuTensorMapEncodeTiled
    return tuple([ctypes.cast(f, ctypes.c_void_p).value for f in functions])


@lru_cache(None)
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def ensure_context(device: torch.device) -> None:
    """Makes sure that the thread has a context. A thread that has not used CUDA yet has none, but loading a kernel or
    describing a tensor needs one."""
    if not hasattr(_thread, "has_context"):
        context = ctypes.c_void_p()
        _check(library().cuCtxGetCurrent(ctypes.byref(context)), "find the thread's context")
        if not context:
            make_current(device)
        _thread.has_context = True


def make_current(device: torch.device) -> None:
    """Makes the device's context current in this thread."""
    cuda, context = library(), ctypes.c_void_p()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index), "find the device's context")
    _check(cuda.cuCtxSetCurrent(context), "use the device's context")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA could not {what}: error {status}, {(text.value or b'unknown').decode()}")
