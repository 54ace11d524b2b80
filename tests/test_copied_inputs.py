"""Inputs of which kernels need copies, in calls that come again: no later call may get the tensors themselves.

On a GPU results are compared with the recurrence. Elsewhere a GPU is pretended (pretended_gpu.py). There plans of
'hopper' say what they copy, and each of their calls has to copy it.
"""

import shutil
from dataclasses import replace
from typing import Any, NamedTuple
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


class Launches(NamedTuple):
    """Those of one plan."""

    copies: set[str]  # tensors of which the plan has a copy
    used: set[str]  # tensors that kernels get
    calls: list[Any]  # for each call the layouts of the given tensors, and the tensors that were copied


def names_in(values):
    """The names of layouts in a step's arguments."""
    from flash_delta.kernels.runtime.plan import Descriptor, Layout

    for value in values:
        if isinstance(value, Layout):
            yield value.name
        elif isinstance(value, Descriptor):
            yield value.tensor.name
        elif isinstance(value, tuple):
            yield from names_in(value)


def launches(place, member, copied, training):
    """All launches of calls, one after the other."""
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import run

    found, filled, fill = [], [], run.fill

    class Noting(run.Launched):
        def __init__(self, plan, *more):
            super().__init__(plan, *more)
            copies = {m.filled.name for m in plan.memory if m.filled is not None}
            found.append(Launches(copies, {name for step in plan.steps for name in names_in(step.arguments)}, []))
            self.noted = found[-1]

        def __call__(self, device, groups):
            filled.clear()
            results = super().__call__(device, groups)
            layouts = [None if t is None else (t.dtype, t.stride(), t.data_ptr() % 16) for g in groups for t in g]
            self.noted.calls.append((layouts, {*filled}))
            return results

    def noting(t, value, tensors):
        filled.append(value)
        fill(t, value, tensors)

    with pretended_gpu(place), patch.object(run, "Launched", Noting), patch.object(run, "fill", noting):
        for seed in range(CALLS):
            x = inputs(member, copied, "cpu", seed, training)
            o, final = MEMBERS[member].op(**x, backend="hopper")
            if training:
                torch.autograd.grad((o, final), [x["q"], x["v"]], (torch.ones_like(o), torch.ones_like(final)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@TRAINING
@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("member", ["gdn", "kda"])
def test_later_calls_get_what_the_first_one_got(process, place, member, copied, training):
    plans = process.submit(launches, place, member, copied, training).result()
    assert sum(len(of.calls) for of in plans) == CALLS * (1 + training)
    assert len(plans) <= 2 * (1 + training)  # a process's first call is known by a key of Python, and others by C's
    for of in plans:
        read = "g" if member == "gdn" else "initial_state" if "do" in of.used else None  # whose gaps kernels take
        assert of.copies == COPIED[copied].keys() - {read}
        assert of.used.isdisjoint(of.copies)
        assert all(call == (of.calls[0][0], of.copies) for call in of.calls)


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
