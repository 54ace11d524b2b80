"""Launches on NVIDIA's driver itself: all that it takes lies ready in memory, where a call only writes addresses.

Triton's launcher converts every argument of every launch (7 us of host time for the 76 of `decode`), makes descriptors
for the copy engine anew each time, and up to 3.6 is a C source of its own for every kernel, compiled at its first use.
What a kernel gets is the same: its parameters in their order, without constants, then Triton's two scratch pointers.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

FORMATS = {  # of `struct`, by Triton's names of types
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
SCRATCH = -1  # where a call's addresses have that of its scratch memory, if it needs any
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread that has not used CUDA yet has none
MAP_BYTES = 128  # of a descriptor


class Pointer(NamedTuple):
    """A parameter that is an address: which of the call's tensors, and bytes from its start."""

    tensor: int
    offset: int


class Map(NamedTuple):
    """A descriptor for the copy engine, but for the address."""

    tensor: int
    swizzle: int
    element: tuple[int, int]  # its bytes, the driver's number of its type
    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """One launch, but for the addresses. It holds no tensor."""

    name: str
    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes
    overlaps: bool  # it may start under the end of the launch before
    scratch: int  # bytes
    parameters: tuple[Pointer | Map | bytes, ...]


class Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


OVERLAPPING = Attribute(OVERLAP, 0, (1,))


def make_step(compiled: Any, grid: tuple[int, int, int], values: Sequence[Any]) -> Step:
    """``values``: of all the kernel's parameters, a `Pointer` for every address, a `Map` for every descriptor."""
    m, parameters = compiled.metadata, []
    for kind, value in zip(compiled.src.signature.values(), values, strict=True):
        parameters += _parameters(kind, value)
    scratch = grid[0] * grid[1] * grid[2] * m.global_scratch_size
    parameters += [Pointer(SCRATCH, 0) if scratch else bytes(8), bytes(8)]  # the second one is a profiler's
    return Step(
        compiled.name, load(compiled), grid, 32 * m.num_warps, m.shared, m.launch_pdl, scratch, tuple(parameters)
    )


def _parameters(kind: str | tuple, value: Any) -> Iterator[Pointer | Map | bytes]:
    """What the compiled kernel takes for one parameter of its source."""
    if isinstance(kind, tuple):
        for k, v in zip(kind, value, strict=True):
            yield from _parameters(k, v)
    elif isinstance(value, Map):
        yield value
        yield from (_number("i32", size) for size in value.shape)
        yield from (_number("i64", stride) for stride in value.strides)
    elif kind != "constexpr":
        yield value if isinstance(value, Pointer) else _number(kind, value)


def _number(kind: str, value: float) -> bytes:
    return pack(FORMATS[kind], value).ljust(8, b"\0")


@lru_cache(None)
def load(compiled: Any) -> int:
    """The driver's handle of a kernel, as Triton gets it but without making Triton's launcher."""
    utils, device, m = driver.active.utils, driver.active.get_current_device(), compiled.metadata
    most = utils.get_device_properties(device)["max_shared_mem"]
    if m.shared > most:
        raise OutOfResources(m.shared, most, "shared memory")
    _, function, _, _, most = utils.load_binary(compiled.name, compiled.kernel, m.shared, device)
    if 32 * m.num_warps > most:
        raise OutOfResources(32 * m.num_warps, most, "threads")
    return function


class Replay:
    """A call's launches, again and again."""

    def __init__(self, steps: list[Step]):
        self.steps, self.scratch = steps, max((step.scratch for step in steps), default=0)
        self.frames: list[Frame] = []  # that no thread is using: while one launches, others may run

    def launch(self, device: torch.device, starts: list[int]) -> None:
        """``starts``: the addresses of all tensors of the call."""
        if self.scratch:  # of all launches: one's is free when it is launched, whoever follows (chunk.follow)
            memory = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            starts.append(memory.data_ptr())
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = Frame(self.steps, starts)
        frame.launch(device, starts)
        self.frames.append(frame)


class Frame:
    """Memory from which the driver reads launches. It does so while they are made, so that it can be written again."""

    def __init__(self, steps: list[Step], starts: list[int]):
        every = dict.fromkeys(parameter for step in steps for parameter in step.parameters)
        pointers = [Pointer(tensor, 0) for tensor in range(len(starts))]
        self.inner = tuple(p for p in every if isinstance(p, Pointer) and p.offset)
        self.maps = {m: _describe(m, starts[m.tensor]) for m in every if isinstance(m, Map)}
        numbers = [n for n in every if isinstance(n, bytes)]
        self.addresses = (ctypes.c_uint64 * (len(starts) + len(self.inner)))()
        self.numbers = (ctypes.c_uint64 * len(numbers)).from_buffer_copy(b"".join(numbers))
        places = {m: _place(described) for m, described in self.maps.items()}
        for values, memory in (((*pointers, *self.inner), self.addresses), (numbers, self.numbers)):
            places |= {value: ctypes.addressof(memory) + 8 * i for i, value in enumerate(values)}
        places[Pointer(SCRATCH, 0)] = places[pointers[SCRATCH]]
        self.moved = [(m.tensor, places[m]) for m in self.maps]
        self.configs = [_configure(step) for step in steps]
        self.launches = [
            (
                ctypes.byref(config),
                ctypes.c_void_p(step.function),
                _array(places[p] for p in step.parameters),
                step.name,
            )
            for config, step in zip(self.configs, steps, strict=True)
        ]
        self.write = Struct(f"{len(self.addresses)}Q").pack_into
        self.starts: list[int | None] = [None] * len(starts)
        self.stream: int | None = None

    def launch(self, device: torch.device, starts: list[int]) -> None:
        stream, cuda = driver.active.get_current_stream(device.index), library()
        if stream != self.stream:
            for config in self.configs:
                config.stream = stream
            self.stream = stream
        if starts != self.starts:
            self.write(self.addresses, 0, *starts, *[starts[tensor] + offset for tensor, offset in self.inner])
            for tensor, place in self.moved:
                if starts[tensor] != self.starts[tensor]:
                    _check(cuda.cuTensorMapReplaceAddress(place, starts[tensor]), "describe a tensor")
            self.starts = starts
        for config, function, parameters, name in self.launches:
            status = cuda.cuLaunchKernelEx(config, function, parameters, None)
            if status == INVALID_CONTEXT:
                make_current(device)
                status = cuda.cuLaunchKernelEx(config, function, parameters, None)
            if status:
                _check(status, f"launch {name}")


def _configure(step: Step) -> Config:
    overlaps = int(step.overlaps)
    return Config(step.grid, (step.threads, 1, 1), step.shared, None, ctypes.pointer(OVERLAPPING), overlaps)


def _array(places: Iterable[int]) -> Any:
    places = list(places)
    return (ctypes.c_void_p * len(places))(*places)


def _describe(m: Map, address: int) -> Any:
    """Triton's object around the driver's descriptor."""
    utils = driver.active.utils
    fill = utils.fill_tma_descriptor_tiled if hasattr(utils, "fill_tma_descriptor_tiled") else utils.fill_tma_descriptor
    return fill(address, m.swizzle, *m.element, m.box, m.shape, m.strides, 0)


def _place(described: Any) -> int:
    """Where the descriptor lies: at the end of its object."""
    return id(described) + type(described).__basicsize__ - MAP_BYTES


@lru_cache(None)
def library() -> ctypes.CDLL:
    """Python's lock is free while it works: a launch waits where a queue is full."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuTensorMapReplaceAddress.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return cuda


def make_current(device: torch.device) -> None:
    """The device's context, for this thread."""
    cuda, context = library(), ctypes.c_void_p()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index), "find the device's context")
    _check(cuda.cuCtxSetCurrent(context), "use the device's context")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA could not {what}: error {status}, {(text.value or b'unknown').decode()}")
