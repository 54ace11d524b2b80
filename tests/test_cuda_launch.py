"""Launches on NVIDIA's driver itself against Triton's launcher, byte by byte, on a driver that notes what it gets."""

import ctypes
import shutil
import subprocess
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from flash_delta.kernels.hopper import again, layouts
from flash_delta.kernels.triton import cuda
from flash_delta.kernels.triton.cuda import Pointer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]
DEVICE = torch.device("cuda", 0)
ELEMENT = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False, "block_size": [64, 128]}
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
    source, library = Path(__file__).with_name("fake_cuda.c"), place / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # and whoever asks for libcuda.so.1 finds it
    with knobs.nvidia.scope(), knobs.cache.scope(), pytest.MonkeyPatch.context() as m:
        knobs.nvidia.libcuda_path, knobs.cache.dir = str(place), str(place / "cache")
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        cuda.library.cache_clear()
        target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
        active = SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda index: 77
        )
        m.setattr(driver, "_active", active)
        active.utils = nvidia.CudaUtils()
        m.setattr(cuda, "load", lambda compiled: compiled.function)
        yield loaded
    for cached in (nvidia.libcuda_dirs, nvidia.library_dirs, cuda.library):
        cached.cache_clear()


def kernel(scratch=0, overlaps=True, signature=SIGNATURE, sizes=BYTES):
    """As if compiled."""
    described = [ELEMENT] if "d" in signature else None
    metadata = Metadata(4, 1, 4096, overlaps, False, scratch, 128, 0, 1, described, "")
    function = (ctypes.c_uint64 * (len(sizes) + 1))(len(sizes), *sizes)
    loaded.append(function)
    source = SimpleNamespace(signature=signature, constants={})
    return SimpleNamespace(src=source, metadata=metadata, function=ctypes.addressof(function), name="kernel")


def taken(fake):
    """What the driver got since it was last asked."""
    used = ctypes.c_size_t.in_dll(fake, "used")
    got = bytes((ctypes.c_ubyte * 65536).in_dll(fake, "written")[: used.value])
    used.value = 0
    return got


def described(t):
    return TensorDescriptor(t, [640, 128], [128, 1], [64, 128], layouts.TILE.value)


def launched_by_triton(fake, compiled, stream, q, bounds):
    run = nvidia.CudaLauncher(compiled.src, compiled.metadata)
    m = compiled.metadata
    run(
        3, 2, 1, stream, compiled.function, (m.num_warps, m.num_ctas, m.shared), None, None, None,
        described(q), q, bounds, None, *SCALARS,
    )  # fmt: skip
    return taken(fake)


def step_of(compiled, q, bounds):
    plan = again.Plan((3, 2), (described(q), q, bounds), {"none": None} | dict(enumerate(SCALARS)))
    return again._step(compiled, plan, (q, bounds))


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_driver_gets_what_tritons_launcher_hands_over(fake, overlaps):
    """Called again and again: with the same addresses, with others, on another stream."""
    compiled = kernel(overlaps=overlaps)
    q, bounds, other = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32), torch.empty(640, 128).half()
    replay = cuda.Replay([step_of(compiled, q, bounds)])
    for stream, first in ((77, q), (77, q), (77, other), (78, other), (78, q)):
        driver.active.get_current_stream = lambda index, stream=stream: stream
        replay.launch(DEVICE, [first.data_ptr(), bounds.data_ptr()])
        got = taken(fake)
        assert got == launched_by_triton(fake, compiled, stream, first, bounds)
        assert len(got) == 28 + 8 + 4 + 8 * overlaps + sum(BYTES)
    assert len(replay.frames) == 1


def test_scratch_memory_lies_behind_the_tensors(fake, monkeypatch):
    """Of several launches the greatest; each gets its address."""
    memory = torch.empty(96, dtype=torch.uint8)
    asked = []
    monkeypatch.setattr(cuda.torch, "empty", lambda size, **options: asked.append((size, options)) or memory)
    signature = {"x": "*i8", "n": "i32"}
    steps = [
        cuda.make_step(kernel(scratch, False, signature, (8, 4, 8, 8)), (grid, 1, 1), (Pointer(0, 16), 5))
        for scratch, grid in ((16, 2), (16, 6), (0, 1))
    ]
    cuda.Replay(steps).launch(DEVICE, [4096])
    assert asked == [(96, {"dtype": torch.uint8, "device": DEVICE})]
    size = 28 + 8 + 4 + 8 + 4 + 8 + 8
    got = taken(fake)
    launches = [got[start : start + size] for start in range(0, len(got), size)]
    where = [int.from_bytes(one[52:60], "little") for one in launches]
    assert [int.from_bytes(one[40:48], "little") for one in launches] == [4112] * 3
    assert where == [memory.data_ptr()] * 2 + [0]


def test_a_call_without_launches(fake):
    cuda.Replay([]).launch(DEVICE, [4096])
    assert taken(fake) == b""


def test_errors_name_the_kernel(fake):
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    replay = cuda.Replay([step_of(kernel(), q, bounds)])
    failing = ctypes.c_int.in_dll(fake, "failing")
    failing.value = 700
    with pytest.raises(RuntimeError, match="CUDA could not launch kernel: error 700, all is fake"):
        replay.launch(DEVICE, [q.data_ptr(), bounds.data_ptr()])
    failing.value = cuda.INVALID_CONTEXT  # of a thread that has not used CUDA yet
    replay.launch(torch.device("cuda", 1), [q.data_ptr(), bounds.data_ptr()])
    assert ctypes.c_void_p.in_dll(fake, "context").value == 17
    assert len(taken(fake)) == 28 + 8 + 4 + 8 + sum(BYTES)


def test_threads_do_not_share_what_they_write(fake, monkeypatch):
    """Both have written their addresses before one launches."""
    q, bounds = torch.empty(640, 128).bfloat16(), torch.empty(4, dtype=torch.int32)
    replay, meet, seen = cuda.Replay([step_of(kernel(), q, bounds)]), threading.Barrier(2), []

    def launch(config, function, parameters, extra):
        meet.wait(10)
        seen.append(ctypes.c_uint64.from_address(parameters[5]).value)
        return 0

    library = SimpleNamespace(cuTensorMapReplaceAddress=lambda *_: 0, cuLaunchKernelEx=launch)
    monkeypatch.setattr(cuda, "library", lambda: library)
    calls = [
        threading.Thread(target=replay.launch, args=(DEVICE, [start, bounds.data_ptr()])) for start in (4096, 8192)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(replay.frames) == 2
    assert sorted(seen) == [4096, 8192]
