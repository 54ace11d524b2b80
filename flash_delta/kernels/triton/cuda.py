"""Launches on NVIDIA's driver itself: all that it takes lies ready in memory, where a call only writes addresses (in C,
known.c).

Triton's launcher converts every argument of every launch (7 us of host time for the 76 of `decode`), makes descriptors
for the copy engine anew each time, and up to 3.6 is a C source of its own for every kernel, compiled at its first use.
What a kernel gets is the same: its parameters in their order, without constants, then Triton's two scratch pointers.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import pack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from flash_delta.kernels import known
from flash_delta.problem import addresses

FORMATS = {  # of `struct`, by Triton's names of types
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
SCRATCH = -1  # the tensor, behind all others, that is a call's scratch memory
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread that has not used CUDA yet has none
MAP_BYTES = 128  # of a descriptor


class Pointer(NamedTuple):
    """A parameter that is an address: which of the call's tensors, and bytes from its start."""

    tensor: int
    offset: int


class Map(NamedTuple):
    """A descriptor for the copy engine, but for the address."""

    at: Pointer
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


class Inner(ctypes.Structure):  # this and what follows: as in known.c
    _fields_ = (("word", ctypes.c_int64), ("offset", ctypes.c_uint64))


class Moved(ctypes.Structure):
    _fields_ = (("word", ctypes.c_int64), ("address", ctypes.c_uint64), ("place", ctypes.c_void_p))


class Launch(ctypes.Structure):
    _fields_ = (("config", ctypes.c_void_p), ("function", ctypes.c_void_p), ("parameters", ctypes.c_void_p))


class Layout(ctypes.Structure):  # Frame
    _fields_ = (
        ("launch", ctypes.c_void_p), ("replace", ctypes.c_void_p), ("words", ctypes.c_void_p),
        ("places", ctypes.c_void_p), ("inner", ctypes.c_void_p), ("moved", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tensors", "spare", "inners", "moves", "count", "done")),
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
    """A call's launches, again and again. ``spare``: how much memory, behind the tensors, only its kernels use, and
    where in it their tensors lie. Scratch memory is one more: one launch's is free when the next one is launched,
    whoever follows (chunk.follow)."""

    def __init__(self, steps: list[Step], spare: tuple[int, tuple[int, ...]] = (0, ())):
        self.steps, self.scratch = steps, max((step.scratch for step in steps), default=0)
        size, places = spare
        self.size, self.places = size + self.scratch, (*places, size) if self.scratch else places
        self.frames: list[Frame] = []  # that no thread is using: while one launches, others may run
        self.start = known.load().launch

    def launch(self, device: torch.device, *groups: tuple[Tensor | None, ...], own: bool = False) -> None:
        """``groups``: all tensors of the call; those that are spare among them only if they are its ``own``."""
        memory = None
        if own and self.scratch:
            groups += ((torch.empty(self.scratch, dtype=torch.uint8, device=device),),)
        elif self.places and not own:
            memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = Frame(self.steps, self.places, starts_of(groups, memory, self.places))
        stream = driver.active.get_current_stream(device.index)
        status = self.start(frame.address, stream, memory, *groups)
        if status == INVALID_CONTEXT:
            make_current(device)
            status = self.start(frame.address, stream, memory, *groups)
        if status:
            done = frame.layout.done
            _check(status, "describe a tensor" if done < 0 else f"launch {self.steps[done].name}")
        self.frames.append(frame)


def starts_of(groups: Iterable[tuple], memory: Tensor | None, places: tuple[int, ...]) -> list[int]:
    """All tensors' addresses."""
    start = 0 if memory is None else memory.data_ptr()
    return [*addresses(chain(*groups)), *(start + place for place in places if memory is not None)]


class Frame:
    """Memory from which the driver reads launches. It does so while they are made, so that it can be written again."""

    def __init__(self, steps: list[Step], places: tuple[int, ...], starts: list[int]):
        every = dict.fromkeys(parameter for step in steps for parameter in step.parameters)
        pointers = [Pointer(tensor, 0) for tensor in range(len(starts))]
        maps = {m: _describe(m, starts[m.at.tensor] + m.at.offset) for m in every if isinstance(m, Map)}
        inner = [p for p in {**every, **dict.fromkeys(m.at for m in maps)} if isinstance(p, Pointer) and p.offset]
        number = {p: i for i, p in enumerate((*pointers, *inner))}  # among the words
        numbers = [n for n in every if isinstance(n, bytes)]
        words = (ctypes.c_uint64 * (len(starts) + len(inner)))()
        constants = (ctypes.c_uint64 * len(numbers)).from_buffer_copy(b"".join(numbers))
        at = {m: _place(described) for m, described in maps.items()}
        for values, memory in (((*pointers, *inner), words), (numbers, constants)):
            at |= {value: ctypes.addressof(memory) + 8 * i for i, value in enumerate(values)}
        if starts:
            at[Pointer(SCRATCH, 0)] = at[pointers[SCRATCH]]
        arrays = [(ctypes.c_void_p * len(step.parameters))(*(at[p] for p in step.parameters)) for step in steps]
        configs = [_configure(step) for step in steps]
        launches = [
            Launch(ctypes.addressof(config), step.function, ctypes.addressof(array))
            for config, step, array in zip(configs, steps, arrays, strict=True)
        ]
        tables = (
            words,
            (ctypes.c_uint64 * len(places))(*places),
            (Inner * len(inner))(*(Inner(*p) for p in inner)),
            (Moved * len(maps))(*(Moved(number[m.at], starts[m.at.tensor] + m.at.offset, at[m]) for m in maps)),
            (Launch * len(launches))(*launches),
        )
        driven = (
            ctypes.cast(f, ctypes.c_void_p) for f in (library().cuLaunchKernelEx, library().cuTensorMapReplaceAddress)
        )
        counts = len(starts) - len(places), len(places), len(inner), len(maps), len(steps), 0
        self.layout = Layout(*driven, *map(ctypes.addressof, tables), *counts)
        self.address = ctypes.addressof(self.layout)
        self.held = maps, constants, arrays, configs, tables  # the layout has addresses only


def _configure(step: Step) -> Config:
    overlaps = int(step.overlaps)
    return Config(step.grid, (step.threads, 1, 1), step.shared, None, ctypes.pointer(OVERLAPPING), overlaps)


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
    return ctypes.CDLL("libcuda.so.1")


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
