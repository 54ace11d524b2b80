"""What our functions do on the host in a decoding step of a transformers layer, counted: how long it takes is printed
by examples/decoding_step.py. On a GPU that is none (pretended_gpu.py)."""

import ctypes
import re
import shutil
import struct
import sys
from collections import Counter
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from example_output import EXAMPLES, printed

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

OURS = {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "gated norm"}
MOST = 35  # Python functions that all three call, which takes most of their time
LAUNCHES = 3
TENSORS = {"new_empty": 4}  # the three outputs and the new state


def counts(place):
    """Counts how often each function of ours calls Python and torch, in a step of a kind that came before."""
    sys.path.append(EXAMPLES)
    import decoding_step

    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.integrations.transformers import enable

    found = {}

    def counting(name, function):
        def call(*args, **kwargs):
            count = found[name] = Counter()

            def note(frame, event, function):
                if event == "call":
                    count["python"] += not frame.f_code.co_filename.endswith("pretended_gpu.py")
                elif event == "c_call":
                    owner, _, name = function.__qualname__.rpartition(".")
                    count[f"torch {name}" if owner in ("Tensor", "_VariableFunctionsClass") else name] += 1

            sys.setprofile(note)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call

    step = decoding_step.make_step(3, torch.device("cpu"))
    with enable() as report, pretended_gpu(place):
        for _ in range(3):  # looked at; known by Python's key; by C's
            step()
        with decoding_step.watching(report, counting):
            step()
    return found


def test_a_step_of_ours_is_three_launches_and_little_python(process, place):
    found = process.submit(counts, place).result()
    assert found.keys() == OURS
    total = sum(found.values(), Counter())
    assert 0 < total["python"] <= MOST
    assert total["launch"] == LAUNCHES
    assert {name.removeprefix("torch "): n for name, n in total.items() if name.startswith("torch ")} == TENSORS


kept = []  # functions of compiled kernels, which stay as long as their process


def addresses_of_steps(place, gradients):
    """Runs some recurrent steps, each on other tensors. Returns for each what the kernel was given and what it should
    be given, and a None for every time that the call was looked at again."""
    import torch

    import flash_delta
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import cuda_driver, run

    B = 4 if gradients else 3  # of which the process knows nothing yet
    found, pointers, run_new = [], 8, run.run_new
    function = (ctypes.c_uint64 * (1 + pointers))(pointers, *[8] * pointers)  # see fake_cuda.c
    kept.append(function)

    def looking(*args, **kwargs):
        found.append(None)
        return run_new(*args, **kwargs)

    with (
        torch.set_grad_enabled(gradients),
        pretended_gpu(place),
        patch.object(cuda_driver, "load", lambda kernel, compiled: ctypes.addressof(function)),
        patch.object(run, "run_new", looking),
    ):
        for _ in range(4):
            q, k = torch.randn(2, B, 1, 2, 32)
            v, state = torch.randn(B, 1, 4, 32), torch.randn(B, 4, 32, 32)
            g, beta = torch.zeros(2, B, 1, 4)
            o, final = flash_delta.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=state, output_final_state=True
            )
            driver = cuda_driver.library()
            used = ctypes.c_size_t.in_dll(driver, "used")
            written = bytes((ctypes.c_ubyte * used.value).in_dll(driver, "written"))
            used.value = 0
            given = struct.unpack(f"{pointers}Q", written[-8 * pointers :])
            found.append((given, tuple(t.data_ptr() for t in (q, k, v, g, beta, state, final, o))))
    return found


@pytest.mark.parametrize("gradients", [False, True])
def test_a_known_step_gets_its_own_addresses(process, place, gradients):
    """It is looked at as long as C's key is new to it, and launched from memory from then on. With autograd on it takes
    a longer way to that."""
    found = process.submit(addresses_of_steps, place, gradients).result()
    assert [step is None for step in found[:2]] == [True, False]
    assert None not in found[-2:]
    for given, expected in filter(None, found):
        assert given == expected
        assert len({*given}) == 8


def test_the_split_is_printed(process):
    out = process.submit(printed, "decoding_step", "--pretend", "--steps", "20", "--profile", "5").result()
    times = {name: float(us) for name, us in re.findall(r"│ +([\w' ()]+?) +│ +(-?[\d.]+) │", out)}
    assert times.keys() == OURS | {"ours", "transformers' own", "with enable()"}, out
    assert times["ours"] == pytest.approx(sum(times[name] for name in OURS), abs=0.2)
    assert times["with enable()"] == pytest.approx(times["ours"] + times["transformers' own"], abs=0.2)
    assert "Ordered by: internal time" in out
