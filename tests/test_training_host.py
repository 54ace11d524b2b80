"""What a training step does on the host, counted: how long it takes is printed by examples/training_step.py. On a GPU
that is none (pretended_gpu.py)."""

import ctypes
import re
import shutil
import struct
import sys
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from example_output import EXAMPLES, printed

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

PACKED = 2  # of training_step.ROWS
MOST, BOUNDS = 30, 22  # Python functions of ours in both passes; in checking bounds that lie on the host
MEMORY = 11  # tensors: o, final state, what is saved, maps of segments, five gradients, and once for each pass the rest


def counts(place, row):
    """How often a known step calls Python, launches, and allocates."""
    sys.path.append(EXAMPLES)
    import training_step

    from flash_delta.compiler.pretended_gpu import pretended_gpu

    found = Counter()

    def note(frame, event, function):
        if event == "call":
            file = frame.f_code.co_filename
            found["python"] += "flash_delta" in file and not file.endswith("pretended_gpu.py")
        elif event == "c_call":
            found[function.__name__] += 1

    with pretended_gpu(place):
        step = training_step.make_step(training_step.ROWS[row], torch.device("cpu"))
        for _ in range(3):  # looked at; known by Python's key; by C's
            step.backward(step.forward())
        sys.setprofile(note)
        try:
            step.backward(step.forward())
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("row", range(4))
def test_a_known_step_is_two_launches_of_c_and_little_python(process, place, row):
    found = process.submit(counts, place, row).result()
    assert found["launch"] == 2, "all kernels of a pass are launched in one go"
    assert 0 < found["python"] <= MOST + (BOUNDS if row == PACKED else 0)
    assert 0 < sum(found[name] for name in ("new_empty", "empty", "empty_like", "empty_strided")) <= MEMORY


def saved(place, row, options):
    """How many bytes autograd keeps of a step, and how many of its inputs are among them."""
    sys.path.append(EXAMPLES)
    import training_step

    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from workshop.bench.timing import saved_bytes

    w = training_step.ROWS[row]
    with pretended_gpu(place):
        step = training_step.make_step(w, torch.device("cpu"))
        kept = saved_bytes(lambda: w.op.op(*step.tensors, **options)[0])
        return kept, sum(t.nbytes for t in step.tensors)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("row", "H", "segments"), [(0, 16, 4), (1, 4, 16)])
def test_little_is_saved(process, place, row, H, segments, norms):
    """Inputs and A with room for two parts (FlashQLA keeps 8 KB of it); of a segment its map and the state before it;
    norms."""
    kept, inputs = process.submit(saved, place, row, {"use_qk_l2norm_in_kernel": norms}).result()
    A, of_segment, tokens = 2 * 3 * 64 * 32, 2 * 4 * 128 * 128, 8192
    assert kept == inputs + 2 * H * (tokens // 64 * A + segments * of_segment) + norms * 2 * 4 * tokens * H


kept = []  # functions of compiled kernels, which stay as long as their process


def rule_step(T, width):
    """The inputs of a call of the rule, and its output."""
    import flash_delta

    q, k = (torch.randn(1, T, 2, width, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    v = torch.randn(1, T, 4, width, dtype=torch.bfloat16, requires_grad=True)
    g, beta = (torch.zeros(1, T, 4, requires_grad=True) for _ in "gb")
    return (q, k, v, g, beta), flash_delta.chunk_gated_delta_rule(q, k, v, g, beta)[0]


def step_around(T, kind):
    """Returns what `rule_step` returns, for what is around the rule."""
    from flash_delta import fused_kda_gate
    from flash_delta.modules import causal_conv1d, rms_norm

    x = torch.randn(2, T, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    if kind == "convolution":
        inputs = x, torch.randn(128, 4, requires_grad=True)
        y = causal_conv1d(x.view(2, T, 128), inputs[1])[0]
    elif kind == "norm":
        inputs = x, torch.randn(64, requires_grad=True)
        y = rms_norm(*inputs, 1e-6)
    else:  # PyTorch sums up what kernels have written for the gradients of parameters
        inputs = (x,)
        y = fused_kda_gate(x, torch.randn(2, requires_grad=True), torch.randn(128, requires_grad=True))
    return inputs, y


def addresses_of_passes(place, make_step, kind, contiguous, pointers):
    """Runs some steps, each on other tensors. Returns whether the kernels of the backward pass got the gradients'
    addresses; and None for every time that a backward pass was looked at. ``pointers``: so many parameters of a kernel
    are noted."""
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import cuda_driver
    from flash_delta.kernels.runtime import run as runner

    found, look = [], runner.run_new

    function = (ctypes.c_uint64 * (1 + pointers))(pointers, *[8] * pointers)  # see fake_cuda.c
    kept.append(function)
    with pretended_gpu(place), patch.object(cuda_driver, "load", lambda kernel, compiled: ctypes.addressof(function)):
        T = 200 if contiguous else 300  # of which the process knows nothing yet
        for _ in range(5):
            inputs, y = make_step(T, kind)
            dy = torch.ones_like(y) if contiguous else torch.ones([1] * y.dim(), dtype=y.dtype).expand(y.shape)
            driver = cuda_driver.library()
            used = ctypes.c_size_t.in_dll(driver, "used")
            used.value = 0
            with patch.object(runner, "run_new", lambda *given: found.append(None) or look(*given)):
                wanted = torch.autograd.grad(y, inputs, dy)
            written = bytes((ctypes.c_ubyte * used.value).in_dll(driver, "written"))
            given = {struct.unpack_from("Q", written, at)[0] for at in range(0, len(written) - 7, 4)}
            found.append([t.data_ptr() in given for t in wanted])
    return found


@pytest.mark.parametrize("width", [64, 60])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_known_backward_pass_gets_its_own_addresses(process, place, contiguous, width):
    """Also one whose incoming gradient has to be copied first, as that of a sum, and one whose heads are padded."""
    found = process.submit(addresses_of_passes, place, rule_step, width, contiguous, 8).result()
    assert None in found[:2]
    assert None not in found[-2:]
    for addresses in filter(None, found):
        assert all(addresses)


@pytest.mark.parametrize("kind", ["convolution", "norm", "gate"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_backward_passes_around_the_rule_are_known(process, place, contiguous, kind):
    """Also one whose incoming gradient has to be copied."""
    found = process.submit(addresses_of_passes, place, step_around, kind, contiguous, 5).result()
    looks, passes = found.count(None), [addresses for addresses in found if addresses is not None]
    assert len(passes) == 5
    assert all(map(all, passes))
    assert looks <= 2


def test_the_split_is_printed(process):
    out = process.submit(
        printed, "training_step", "--pretend", "--steps", "5", "--new-lengths", "--one-thread"
    ).result()
    rows = [[float(us) for us in re.findall(r"│ +([\d.]+) +", line)] for line in out.splitlines() if "│" in line]
    assert [len(row) for row in rows] == [4] * 5, out
    for forward, backward, ours, step in rows:
        assert step == pytest.approx(forward + backward, abs=0.2)
        assert ours < backward
