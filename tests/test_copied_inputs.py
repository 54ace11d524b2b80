"""Inputs of which kernels need copies, in calls that come again: no later call may get the tensors themselves.

On a GPU results are compared with the recurrence. Elsewhere a GPU is pretended (pretended_gpu.py), and what launches
of 'hopper' get is compared with what the first one got. Plans name copies (test_plans.py).
"""

import shutil
from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.testing import MEMBERS, Case, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import TENSORS, infer, products_in, run, truth
from flash_delta.testing.inputs import with_gaps

RAW = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
CASE = Case("copied", "of what kernels cannot read", B=1, T=200, K=128, V=128, options=RAW)
CALLS = 4


def shifted(t):
    """Returns the numbers two bytes (four in float32) after a multiple of 16."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


COPIED = {
    "nothing": {},
    "state-of-16-bits": {"initial_state": lambda t: t.to(torch.bfloat16)},
    "state-with-gaps": {"initial_state": with_gaps},
    "queries-with-gaps": {"q": with_gaps},
    "values-shifted": {"v": shifted},
    "gates-with-gaps": {"g": with_gaps},
    "parameters-with-gaps": {"A_log": with_gaps, "dt_bias": with_gaps},
    "bounds-with-gaps": {"cu_seqlens": with_gaps},
}
CELLS = pytest.mark.parametrize(
    ("member", "backend", "copied"),
    [
        pytest.param(member, backend, copied, id=f"{member}-{backend}-{copied}")
        for member in ("gdn", "kda")
        for backend in ("hopper", "triton")
        for copied in COPIED
    ],
)
TRAINING = pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])


def inputs(member, copied, device, seed, training):
    case = replace(CASE, lengths=(130, 0, 70)) if "cu_seqlens" in COPIED[copied] else CASE
    x = make_inputs(case, MEMBERS[member], torch.bfloat16, device, seed)
    for name, change in COPIED[copied].items():
        x[name] = change(x[name].detach())
    return {n: t.detach().requires_grad_(training) if n in TENSORS else t for n, t in x.items()}


def layouts(place, member, copied, training):
    """The layouts of the tensors that each replay gets, call after call."""
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime.cuda_driver import Replay

    found, launch = defaultdict(list), Replay.launch

    def noting(replay, device, *groups, own=False):
        tensors = [t for group in groups for t in group]
        found[id(replay)].append([t if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for t in tensors])
        launch(replay, device, *groups, own=own)

    with pretended_gpu(place), patch.object(Replay, "launch", noting):
        for seed in range(CALLS):
            x = inputs(member, copied, "cpu", seed, training)
            o, final = MEMBERS[member].op(**x, backend="hopper")
            if training:
                torch.autograd.grad((o, final), [x["q"], x["v"]], (torch.ones_like(o), torch.ones_like(final)))
    return list(found.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@TRAINING
@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("member", ["gdn", "kda"])
def test_later_calls_get_what_the_first_one_got(process, place, member, copied, training):
    replays = process.submit(layouts, place, member, copied, training).result()
    assert sum(map(len, replays)) == CALLS * (1 + training)
    assert len(replays) <= 2 * (1 + training)  # a process's first call is known by a key of Python, and others by C's
    for calls in replays:
        n = min(map(len, calls))  # spare tensors, the last ones, are there only once
        assert all(call[:n] == calls[0][:n] for call in calls)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@TRAINING
@CELLS
def test_later_calls_are_right(member, backend, copied, training):
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("there is no Hopper GPU")
    op, dtype = MEMBERS[member], torch.bfloat16
    for seed in range(CALLS):
        found = (run if training else infer)(op, inputs(member, copied, "cuda", seed, training), backend)
        x = inputs(member, copied, "cpu", seed, True)
        want = truth(op, x)
        with products_in(dtype):
            alone = run(op, x, "torch")
        for name in (n for n, t in want.items() if n in found and t.numel() > CASE.HV):  # errors of so few scatter
            error, limit = relative_error(found[name].cpu(), want[name]), relative_error(alone[name], want[name])
            assert error <= allowed(limit, dtype), f"call {seed}: {name}"
