"""Gradients of Kimi Delta Attention on the Hopper backend, on a CPU: `chunk_back` is emulated, Triton's interpreter
runs all else."""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flash_delta import explain

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.channel.backward import gradients
from flash_delta.kernels.hopper.channel.backward import run as channel_backward
from flash_delta.kernels.hopper.channel.plan import plan_backward
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.runtime.workspace import DeepChunks
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton import backward as triton_backward
from flash_delta.kernels.triton.backward.chunks import CHUNKS
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved
from flash_delta.problem import Gate, Inputs
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from flash_delta.testing.cases import Case
from tests.gluon_emulator import emulate, take_every_call

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
KDA = MEMBERS["kda"]
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
BOUNDED = RAW | {"lower_bound": -5.0}
# Empty sequences, whole and partial chunks, one of one token, and guard rows.
PACKED = Case("", "", B=1, T=290, H=1, HV=1, K=128, V=128, lengths=(0, 1, 150, 0, 64, 65, 0))
ROWS = replace(PACKED, B=2, T=100, H=2, HV=2, lengths=None)
ROW = replace(ROWS, B=1, H=1, HV=1)
CELLS = {
    "packed": PACKED,
    "rows": ROWS,
    "bounded": replace(PACKED, H=3, HV=3, options=BOUNDED),
    "raw": replace(ROWS, options=RAW),
    "promised": replace(ROW, options={"lower_bound": -5.0, "safe_gate": True}),
    "strong-decay": replace(ROW, T=130, decay="strong"),
    "extreme-decay": replace(ROW, T=130, decay="extreme"),
    "rising": replace(ROW, T=70, decay="rising"),
    "extreme-raw": replace(ROW, H=3, HV=3, T=70, decay="extreme", options=RAW),
    "v-first": replace(ROW, options=BOUNDED | {"state_v_first": True}),
    "no-initial-state": replace(ROW, initial_state=False),
    "correlated-keys": replace(ROW, keys="correlated", options=BOUNDED | {"allow_neg_eigval": True}),
    "zero-keys": replace(ROW, keys="some zero"),
    "left-by-forward": replace(ROW, T=130, options=BOUNDED | {"disable_recompute": True}),
    "all-empty": replace(PACKED, T=4, lengths=(0, 0)),
}

SCATTERS = {"dA_log": 0.02}  # one number a head, a sum of many that cancel: docs/notes has it beside `triton`'s


@pytest.fixture
def on_cpu(monkeypatch):
    def chosen():
        emulate(monkeypatch, (gradients, "chunk_back"))
        chunks = CHUNKS._replace(hands=(DeepChunks,), find=channel_backward.find_gradients)
        plans = triton_backward.plan
        monkeypatch.setattr(plans, "plan_backward", partial(plans.plan_backward, chunks=chunks))
        take_every_call(monkeypatch, triton.forward)

    return chosen


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_recurrence(on_cpu, cell):
    x = make_inputs(CELLS[cell], KDA, torch.bfloat16)
    wanted = truth(KDA, x)
    with products_in(torch.bfloat16):
        reference = run(KDA, x, backend="torch")
    on_cpu()
    results = run(KDA, x)
    assert results.keys() == wanted.keys()
    for tensor, got in results.items():
        error, rounded = (relative_error(t, wanted[tensor]) for t in (got, reference[tensor]))
        assert error <= max(allowed(rounded, torch.bfloat16), SCATTERS.get(tensor, 0.0)), tensor


def test_a_promise_rules_the_second_launch_out():
    """That for chunks in which a channel falls too far."""
    x, rest = make_inputs(ROW, KDA, torch.bfloat16), []
    given = Inputs(**{name: x.get(name) for name in Inputs._fields})
    groups = [layouts_of(group) for group in (given, OutputGradients(x["v"], None), Saved(None))]
    for promise in ({}, {"safe_gate": True}, {"lower_bound": -1.0}):
        p = explain(KDA.op, **x, **promise).problem
        plan = plan_backward(p, Chip("sm_90", 132), *groups, choice=None)
        rest += [step.constants["DEEP"] for step in plan.steps if step.kernel is gradients.chunk_back]
    assert rest == [False, True, False, False]


def test_what_is_left_to_triton():
    p = SimpleNamespace(H=1, HV=2, gate=Gate("channel", True), channel_strength=False)
    assert "as many key heads as value heads; there are 1 and 2" in channel_backward.unsupported(p)
    p.HV, p.gate = 1, Gate("channel", True, -8.0)
    assert "lower_bound of -5 or more, it is -8" in channel_backward.unsupported(p)
    p.channel_strength, p.gate = True, Gate("channel", dtype=torch.float32)
    assert "if g is torch.bfloat16" in channel_backward.unsupported(p)
    p.gate = p.gate._replace(dtype=torch.bfloat16)
    assert channel_backward.unsupported(p) is None
