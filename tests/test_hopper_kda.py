"""Kimi Delta Attention on the Hopper backend, on a CPU: kernels in Gluon are emulated, Triton's interpreter runs
`scan`."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.channel import prepare, run, walk
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence
from flash_delta.testing.cases import Case
from tests.gluon_emulator import Kernel, emulated, take_every_call
from tests.hostile_bounds import T, hostile, leave_unread

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
KDA = MEMBERS["kda"]
RAW = {
    "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True,
    "lower_bound": -5.0,
}  # fmt: skip
# Empty sequences, whole and partial chunks, one of one token, and guard rows.
PACKED = Case("", "", B=1, T=290, H=1, HV=2, K=128, V=128, lengths=(0, 1, 150, 0, 64, 65, 0), options=RAW)
ROWS = replace(PACKED, B=2, T=100, lengths=None)
ROW = replace(ROWS, B=1, HV=1)
CELLS = {
    "packed": PACKED,
    "rows": ROWS,
    "three-heads": replace(ROWS, H=2, HV=6, T=70),
    "strong-decay": replace(ROW, T=130, decay="strong"),
    "bare": replace(ROWS, options={"use_gate_in_kernel": True, "lower_bound": -5.0}),
    "v-first": replace(ROW, options=RAW | {"state_v_first": True}),
    "no-initial-state": replace(ROW, initial_state=False),
    "correlated-keys": replace(ROW, keys="correlated", options=RAW | {"allow_neg_eigval": True}),
    "zero-keys": replace(ROW, keys="some zero"),
    "all-empty": replace(PACKED, T=4, lengths=(0, 0)),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its kernels emulated, as the choice of every call; `walk_channels` walks, or `scan`."""
    for module, name in ((prepare, "prepare"), (walk, "walk_channels")):
        path = module.__name__.removeprefix("flash_delta.kernels.hopper.")
        kernel = Kernel(getattr(emulated("flash_delta.kernels.hopper", path), name))
        monkeypatch.setattr(module, name, kernel)

    def chosen(by_hand):
        monkeypatch.setattr(run, "walks_by_hand", lambda p, chip: by_hand)
        take_every_call(monkeypatch, run.forward)

    return chosen


@pytest.mark.parametrize("by_hand", [True, False], ids=["walk", "scan"])
@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, cell, by_hand):
    case, dtype = CELLS[cell], torch.bfloat16
    x = make_inputs(case, KDA, dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(KDA, wide, x)
    with products_in(dtype):
        reference = KDA.op(**x, backend="torch")
    on_cpu(by_hand)
    for got, want, rounded in zip(KDA.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), dtype)


@pytest.mark.parametrize("name", ["first-above-0", "down-and-up", "all"])
@torch.no_grad()
def test_wrong_bounds_leave_no_tensor(on_cpu, monkeypatch, name):
    """An address that is beyond a tensor is an error of the emulator or of the bounds' watch."""
    leave_unread(monkeypatch)
    bounds = hostile(name, "cpu")
    x = make_inputs(replace(PACKED, T=T, HV=1, lengths=(T, *(0 for _ in bounds[2:]))), KDA, torch.bfloat16)
    on_cpu(True)
    KDA.op(**(x | {"cu_seqlens": bounds}))


@torch.no_grad()
def test_no_token_changes_one_before_it(on_cpu):
    """Not by a bit, though its block's scores are made with the others'."""
    x = make_inputs(replace(ROW, T=100), KDA, torch.bfloat16)
    on_cpu(True)
    o, _ = KDA.op(**x)
    for t in (99, 70, 45, 17):
        for name in ("q", "k", "v", "g", "beta"):
            x[name].data[:, t:] = torch.randn_like(x[name][:, t:]) * 3
        assert torch.equal(KDA.op(**x)[0][:, :t], o[:, :t])


@torch.no_grad()
def test_parameters_may_be_missing(on_cpu):
    x = make_inputs(replace(ROWS, T=70, options={"use_gate_in_kernel": True, "lower_bound": -4.0}), KDA, torch.bfloat16)
    x["beta"] = torch.ones_like(x["beta"])
    x["A_log"], x["dt_bias"] = torch.zeros_like(x["A_log"]), torch.zeros_like(x["dt_bias"])
    on_cpu(True)
    want = KDA.op(**x)
    del x["A_log"], x["dt_bias"]
    assert all(map(torch.equal, KDA.op(**x), want))


@torch.no_grad()
def test_tensors_that_no_descriptor_can_describe_are_copied(on_cpu):
    x = make_inputs(ROWS, KDA, torch.bfloat16)
    on_cpu(True)
    want = KDA.op(**x)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].data.mT.contiguous().mT
    assert all(map(torch.equal, KDA.op(**x), want))
