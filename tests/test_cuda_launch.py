"""Launches on NVIDIA's driver itself against Triton's launcher, byte by byte, on a driver that notes what it gets."""

import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import weakref
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from struct import pack, unpack
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from flash_delta import compiler
from flash_delta.kernels.hopper.device import layouts
from flash_delta.kernels.runtime import cuda_driver, fastcall
from flash_delta.kernels.runtime.cuda_driver import BoundStep, Replay, kernel_of
from flash_delta.kernels.runtime.plan import Descriptor, Layout, Plan, Step
from flash_delta.kernels.runtime.run import ALIGNED, Launched


def has_driver():
    """Whether NVIDIA's driver is there, though its GPUs may be hidden. Then nobody would find a second one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(has_driver(), reason="the driver is there"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]
DEVICE = torch.device("cuda", 0)
ELEMENT = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False, "block_size": [64, 128]}


class Kernel(SimpleNamespace):
    """Stands for a compiled kernel. It is found again by its identity."""

    __hash__ = object.__hash__


Metadata = namedtuple(
    "Metadata",
    "num_warps num_ctas shared launch_pdl launch_cooperative_grid global_scratch_size global_scratch_align "
    "profile_scratch_size profile_scratch_align tensordesc_meta instrumentation_mode",
)
SIGNATURE = {
    "d": "tensordesc<bf16[64, 128]>", "q": "*bf16", "bounds": "*i32", "none": "constexpr", "N": "i32", "T": "i64",
    "scale": "fp32", "strides": ("i32", ("i64", "constexpr"), "u64"), "yes": "i1", "BLOCK": "constexpr",
}  # fmt: skip
BYTES = (128, 4, 4, 8, 8, 8, 8, 4, 8, 4, 4, 8, 8, 1, 8, 8)
loaded = []  # as long as there may be launches
SCALARS = (-7, 2**40, 0.1, (3, (-5, 1), 2**63 + 1), True, 64)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    place = tmp_path_factory.mktemp("driver")
    source, library = Path(compiler.__file__).with_name("fake_cuda.c"), place / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL("libcuda.so.1")  # the first of this name, which all others find, too
    with knobs.nvidia.scope(), knobs.cache.scope(), pytest.MonkeyPatch.context() as m:
        knobs.nvidia.libcuda_path, knobs.cache.dir = str(place), str(place / "cache")
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        cuda_driver.library.cache_clear()
        target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
        active = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
        m.setattr(driver, "_active", active)
        active.utils = nvidia.CudaUtils()
        m.setattr(cuda_driver, "load", lambda kernel, compiled: compiled.function)
        m.setattr(cuda_driver, "stream_of", lambda index: 77)
        m.setattr(fastcall, "loaded", None)  # and in the end as before
        m.setattr(fastcall, "key", fastcall.look)
        loaded.cuCtxSetCurrent(ctypes.c_void_p(8))
        yield loaded
    for cached in (nvidia.libcuda_dirs, nvidia.library_dirs, cuda_driver.library):
        cached.cache_clear()


def kernel(scratch=0, overlaps=True, signature=SIGNATURE, sizes=BYTES):
    """Returns a kernel that seems to be compiled."""
    described = [ELEMENT] if "d" in signature else None
    metadata = Metadata(4, 1, 4096, overlaps, False, scratch, 128, 0, 1, described, "")
    function = (ctypes.c_uint64 * (len(sizes) + 1))(len(sizes), *sizes)
    loaded.append(function)
    source = SimpleNamespace(signature=signature, constants={})
    return Kernel(src=source, metadata=metadata, function=ctypes.addressof(function), name="kernel")


def taken(fake):
    """What the driver got since it was last asked."""
    used = ctypes.c_size_t.in_dll(fake, "used")
    got = bytes((ctypes.c_ubyte * 65536).in_dll(fake, "written")[: used.value])
    used.value = 0
    return got


class Given(NamedTuple):
    q: Any
    bounds: Any


DESCRIBED = (640, 128), (128, 1), (64, 128), layouts.TILE.value  # sizes, strides, tile


def launched_by_triton(fake, compiled, stream, q, bounds):
    run = nvidia.CudaLauncher(compiled.src, compiled.metadata)
    m = compiled.metadata
    run(
        3, 2, 1, stream, compiled.function, (m.num_warps, m.num_ctas, m.shared), None, None, None,
        TensorDescriptor(q, *map(list, DESCRIBED[:3]), DESCRIBED[3]), q, bounds, None, *SCALARS,
    )  # fmt: skip
    return taken(fake)


def replay_of(compiled, q, bounds, start=None):
    """``start``: where the kernel's q begins in the given one, in bytes."""
    part = Layout((640, 128), (128, 1), torch.bfloat16, name="q", start=start)
    whole = Layout((4,), (1,), torch.int32, name="bounds")
    step = Step(None, (3, 2, 1), None, (Descriptor(part, *DESCRIBED), part, whole, None), dict(enumerate(SCALARS)))
    return Launched(Plan((step,), (), ()), Given._fields, [compiled], (Given(q, bounds),))


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_driver_gets_what_tritons_launcher_hands_over(fake, monkeypatch, overlaps):
    """Called again and again: with the same addresses, with others, on another stream."""
    compiled = kernel(overlaps=overlaps)
    q, bounds, other = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32), torch.empty(640, 128).half()
    current = [77]
    monkeypatch.setattr(cuda_driver, "stream_of", lambda index: current[0])
    replay = replay_of(compiled, q, bounds)
    for stream, first in ((77, q), (77, q), (77, other), (78, other), (78, q)):
        current[0] = stream
        replay.launch(DEVICE, (first,), (bounds,))
        got = taken(fake)
        assert got == launched_by_triton(fake, compiled, stream, first, bounds)
        assert len(got) == 28 + 8 + 4 + 8 * overlaps + sum(BYTES)
    assert len(replay.frames) == 1


def test_descriptors_and_pointers_into_a_workspace(fake):
    """They move with it."""
    compiled, bounds = kernel(), torch.empty(4, dtype=torch.int32)
    memories = [torch.empty(256 + 640 * 128 * 2, dtype=torch.uint8) for _ in range(2)]
    parts = [memory[256:].view(torch.bfloat16).view(640, 128) for memory in memories]
    replay = replay_of(compiled, memories[0], bounds, 256)
    for n in (0, 1, 0):
        replay.launch(DEVICE, (memories[n],), (bounds,))
        assert taken(fake) == launched_by_triton(fake, compiled, 77, parts[n], bounds)


def at(start):
    """A tensor of a type of its own, which is asked where it lies."""
    return SimpleNamespace(data_ptr=lambda: start)


def words(got, number):
    """What each of ``number`` equal launches hands over, without its configuration, in numbers of 8 bytes."""
    size = len(got) // number
    return [unpack(f"{(size - 40) // 8}Q", got[n * size + 40 : (n + 1) * size]) for n in range(number)]


def test_scratch_memory_lies_behind_the_tensors(fake, monkeypatch):
    """Several launches share memory for the one that needs most. Each that needs some gets its address."""
    memory, asked = torch.empty(96, dtype=torch.uint8), []
    monkeypatch.setattr(cuda_driver.torch, "empty", lambda size, **options: asked.append((size, options)) or memory)
    signature = {"x": "*i8", "n": "i64"}
    steps = [
        BoundStep(kernel_of(kernel(scratch, False, signature, (8, 8, 8, 8))), (grid, 1, 1), ((0, 16), 5))
        for scratch, grid in ((16, 2), (16, 6), (0, 1))
    ]
    replay, start = Replay(steps, 1), memory.data_ptr()
    for _ in range(2):
        replay.launch(DEVICE, (at(4096),))
        assert words(taken(fake), 3) == [(4112, 5, start, 0), (4112, 5, start, 0), (4112, 5, 0, 0)]
    assert asked == [(96, {"dtype": torch.uint8, "device": DEVICE})] * 2


def test_what_only_kernels_use_is_one_allocation(fake, monkeypatch):
    """Scratch memory is at the end."""
    memory, asked = torch.empty(1024, dtype=torch.uint8), []
    monkeypatch.setattr(cuda_driver.torch, "empty", lambda size, **options: asked.append(size) or memory)
    compiled = kernel(64, False, {"x": "*i8", "y": "*i8", "z": "*i8"}, (8,) * 5)
    step = BoundStep(kernel_of(compiled), (1, 1, 1), ((0, 0), (1, 0), (2, 32)))
    replay, start = Replay([step], 3, (512, (0, 256))), memory.data_ptr()
    for first in (4096, 12288):
        replay.launch(DEVICE, (at(first),))
        assert words(taken(fake), 1) == [(first, start, start + 256 + 32, start + 512, 0)]
    assert asked == [576, 576]


class Strange(torch.Tensor):
    pass


def test_kernels_get_tensors_where_they_lie(fake):
    """Whatever they are: views, without numbers, missing, parameters, of a class of their own, in inference mode."""
    x = torch.randn(4, 6, 8)
    with torch.inference_mode():
        inferred = torch.zeros(3)
    tensors = (
        x, x[1:], x[..., 3:], x.mT, x[:, ::2], x[2, 3, 5], x[:0], x[4:], torch.empty(0), None, torch.zeros(5).bool(),
        torch.nn.Parameter(x[1]), x[1].expand(9, 6, 8), x[3].as_subclass(Strange), inferred, x.clone().requires_grad_(),
        x,
    )  # fmt: skip
    signature = {f"x{n}": "*i8" for n in range(len(tensors))}
    compiled, places = kernel(0, False, signature, (8,) * (len(tensors) + 2)), [(n, 0) for n in range(len(tensors))]
    replay = Replay([BoundStep(kernel_of(compiled), (1, 1, 1), tuple(places))], len(tensors))
    for given in (tensors, tensors[::-1]):
        replay.launch(DEVICE, given)
        assert words(taken(fake), 1) == [(*(0 if t is None else t.data_ptr() for t in given), 0, 0)]


def of_one_tensor(*functions):
    """A launch of every kernel, of that tensor."""
    step = BoundStep(kernel_of(kernel(0, False, {"x": "*i8"}, (8,) * 3)), (1, 1, 1), ((0, 0),))
    steps = [step._replace(kernel=step.kernel._replace(function=function)) for function in functions]
    return Replay(steps or [step], 1)


def test_no_call_is_launched_with_other_tensors_than_it_has(fake):
    """What is wrong is said, and the memory it would have been written to is left alone."""
    replay = of_one_tensor()
    for groups, error in (((), "got 0"), (((at(1), at(2)),), "got more"), (([at(1)],), "expected tuples")):
        with pytest.raises((TypeError, ValueError), match=error):
            replay.launch(DEVICE, *groups)
        assert replay.frames == []
    with pytest.raises(AttributeError, match="data_ptr"):
        replay.launch(DEVICE, (7,))
    assert replay.frames == []
    assert taken(fake) == b""
    replay.launch(DEVICE, (at(4096),))
    assert words(taken(fake), 1) == [(4096, 0, 0)]


WRONG = [
    ("*i8", 4096 + 64, TypeError, "expected a pointer's place, got 4160"),
    ("*i8", None, TypeError, "expected a pointer's place, got None"),
    ("*i8", torch.empty(3), TypeError, "expected a pointer's place, got tensor"),
    ("*i8", 0.5, TypeError, "expected a pointer's place, got 0.5"),
    ("*i8", (3, 0), ValueError, "expected the number of a tensor of the call, got \\(3, 0\\)"),
    ("*i8", (-1, 0), ValueError, "expected the number of a tensor of the call, got \\(-1, 0\\)"),
    ("*i8", (0,), TypeError, "2 arguments"),
    ("*i8", (0, 0.5), TypeError, "float|integer"),
    ("i32", 2**31, OverflowError, "expected a number of 32 bits, got 2147483648"),
    ("i32", -(2**31) - 1, OverflowError, "expected a number of 32 bits"),
    ("u32", 2**32, OverflowError, "expected a number of 32 bits"),
    ("u64", -1, OverflowError, "int too big|negative int"),
    ("i64", 2**63, OverflowError, "int too big|negative int"),
    ("i8", -129, OverflowError, "expected a number of 8 bits"),
    ("i32", 0.5, TypeError, "float"),
    ("fp32", None, TypeError, "must be real number"),
    (("i32", "i32"), (1,), ValueError, "expected more parameters"),
    (("i32",), (1, 2), ValueError, "expected fewer parameters, got 2"),
    (("i32",), 1, TypeError, "expected a tuple of parameters, got 1"),
]


@pytest.mark.parametrize(("kind", "value", "error", "message"), WRONG)
def test_what_kernels_do_not_take_is_refused(fake, kind, value, error, message):
    step = BoundStep(kernel_of(kernel(0, False, {"x": kind}, (8,) * 3)), (1, 1, 1), (value,))
    with pytest.raises(error, match=message):
        Replay([step], 3)
    with pytest.raises((error, ValueError)):
        Replay([step._replace(values=(value, 1))], 3)


def test_a_frame_has_a_tensor_for_every_place(fake):
    with pytest.raises(ValueError, match="expected a tensor for every place"):
        Replay([], 1, (512, (0, 256)))


def test_numbers_of_every_size(fake):
    """The least and the greatest."""
    signed, unsigned = (tuple(f"{sign}{bits}" for bits in (8, 16, 32, 64)) for sign in "iu")
    kinds = dict(enumerate((*signed, *signed, *unsigned, *unsigned, "fp64", "fp32", "i1")))
    values = (-(2**7), -(2**15), -(2**31), -(2**63), 2**7 - 1, 2**15 - 1, 2**31 - 1, 2**63 - 1, 0, 0, 0, 0)
    values += (2**8 - 1, 2**16 - 1, 2**32 - 1, 2**64 - 1, 1e300, 0.1, True)
    sizes = (1, 2, 4, 8) * 4
    compiled = kernel(0, False, kinds, (*sizes, 8, 4, 1, 8, 8))
    Replay([BoundStep(kernel_of(compiled), (1, 1, 1), values)], 0).launch(DEVICE)
    assert taken(fake)[40:] == pack("<bhiqbhiqBHIQBHIQdfb", *values) + bytes(16)


def test_launches_keep_nothing(fake):
    replay, x, other = of_one_tensor(), torch.empty(3), at(2**40)

    def calls(number):
        for _ in range(number):
            replay.launch(DEVICE, (x,))
            replay.launch(DEVICE, (other,))
            with suppress(AttributeError):
                replay.launch(DEVICE, (7,))
        gc.collect()
        return sys.getallocatedblocks()

    before, blocks = (sys.getrefcount(x), sys.getrefcount(other)), calls(100)
    assert calls(2000) - blocks < 1000
    assert (sys.getrefcount(x), sys.getrefcount(other)) == before
    taken(fake)


def test_a_call_without_launches(fake):
    Replay([], 1).launch(DEVICE, (at(8192),))
    Replay([], 0).launch(DEVICE)
    assert taken(fake) == b""


def test_a_frame_keeps_no_tensor_and_nothing_that_is_collected(fake):
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    alive, replay = [weakref.ref(t) for t in (q, bounds)], replay_of(kernel(), q, bounds)
    replay.launch(DEVICE, (q, bounds))
    del q, bounds
    assert [ref() for ref in alive] == [None, None]
    assert not any(map(gc.is_tracked, replay.frames))
    taken(fake)


def test_errors_name_the_kernel(fake):
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    replay = replay_of(kernel(), q, bounds)
    failing = ctypes.c_int.in_dll(fake, "failing")
    failing.value = 700
    with pytest.raises(RuntimeError, match="CUDA could not launch kernel: error 700, all is fake"):
        replay.launch(DEVICE, (q, bounds))
    failing.value = cuda_driver.INVALID_CONTEXT  # of a thread that has not used CUDA yet
    replay.launch(torch.device("cuda", 1), (q, bounds))
    assert ctypes.c_void_p.in_dll(fake, "context").value == 17
    assert len(taken(fake)) == 28 + 8 + 4 + 8 + sum(BYTES)


def test_a_call_goes_on_where_it_was_refused(fake, monkeypatch):
    """No launch is made twice."""
    launched = []

    def launch(config, function, parameters, extra):
        launched.append(function)
        return cuda_driver.INVALID_CONTEXT if len(launched) == 2 else 0

    stands_in(monkeypatch, launch)
    of_one_tensor(1, 2, 3).launch(DEVICE, (at(4096),))
    assert launched == [1, 2, 2, 3]


def test_a_descriptor_that_is_refused(fake, monkeypatch):
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    stands_in(monkeypatch, lambda *_: 0, lambda *_: 1)
    replay = replay_of(kernel(), q, bounds)
    replay.launch(DEVICE, (at(q.data_ptr() & -ALIGNED), bounds))  # the address that it was made with
    with pytest.raises(RuntimeError, match="CUDA could not describe a tensor: error 1, all is fake"):
        replay.launch(DEVICE, (q.clone(), bounds))


def test_a_tensor_that_the_driver_does_not_describe(fake):
    """A thread without a context, and a descriptor with other axes than the kernel's."""
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    fake.cuCtxSetCurrent(None)
    with pytest.raises(RuntimeError, match=r"could not describe a tensor of \(640, 128\) .* \(128, 1\): error 201"):
        replay_of(kernel(), q, bounds)
    fake.cuCtxSetCurrent(ctypes.c_void_p(8))
    compiled = kernel()
    compiled.metadata = compiled.metadata._replace(tensordesc_meta=[ELEMENT | {"block_size": [1, 64, 128]}])
    with pytest.raises(ValueError, match=r"expected sizes and strides of 3 axes, got \(640, 128\), \(128, 1\)"):
        replay_of(compiled, q, bounds)


def stands_in(monkeypatch, launch, replace=lambda *_: 0):
    """For the driver's functions."""
    number, pointer = ctypes.c_int, ctypes.c_void_p
    functions = Kernel(
        cuLaunchKernelEx=ctypes.CFUNCTYPE(number, *[pointer] * 4)(launch),
        cuTensorMapReplaceAddress=ctypes.CFUNCTYPE(number, pointer, pointer)(replace),
    )
    loaded.append(functions)
    others = cuda_driver.library()
    for name in ("cuGetErrorString", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuTensorMapEncodeTiled"):
        setattr(functions, name, getattr(others, name))
    monkeypatch.setattr(cuda_driver, "library", lambda: functions)


def test_threads_do_not_share_what_they_write(fake, monkeypatch):
    """Both have written their addresses before one launches, for which neither keeps Python's lock; streams are each
    thread's own."""
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    meet, seen = threading.Barrier(2), []

    def launch(config, function, parameters, extra):
        meet.wait(10)
        address = ctypes.c_void_p.from_address(parameters + 5 * 8).value
        seen.append((ctypes.c_uint64.from_address(address).value, ctypes.c_uint64.from_address(config + 32).value))
        return 0

    stands_in(monkeypatch, launch)
    streams = threading.local()
    monkeypatch.setattr(cuda_driver, "stream_of", lambda index: streams.own)
    replay = replay_of(kernel(), q, bounds)

    def call(start):
        streams.own = start // 16
        replay.launch(DEVICE, (at(start), bounds))

    calls = [threading.Thread(target=call, args=(start,)) for start in (4096, 8192)]
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join()
    assert len(replay.frames) == 2
    assert sorted(seen) == [(4096, 256), (8192, 512)]
