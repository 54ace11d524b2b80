"""Heads of other widths than 64 and 128 on the Hopper backend, on a CPU: what is by hand is emulated, Triton's
interpreter runs the rest."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.scalar import choices
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from flash_delta.testing.cases import Case
from tests.gluon_emulator import emulate, take_every_call
from tests.test_hopper_backward import KERNELS, RAW

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
ROWS = Case("", "", B=2, T=70, H=1, HV=2, K=100, V=100)
PACKED = replace(ROWS, B=1, T=140, lengths=(0, 1, 65, 0, 64, 7))
CELLS = {  # member, case, dtype, tokens of a segment
    "rows": ("gdn", ROWS, torch.bfloat16, None),
    "packed-raw": ("gdn", replace(PACKED, options=RAW), torch.bfloat16, None),
    "packed-segments": ("gdn", PACKED, torch.bfloat16, 64),
    "60": ("gdn", replace(ROWS, H=2, HV=4, K=60, V=60, options=RAW), torch.bfloat16, None),
    "96": ("delta-rule", replace(ROWS, K=96, V=96, options={"state_v_first": True}), torch.bfloat16, None),
    "keys-60-values-100": ("gdn", replace(ROWS, K=60, V=100, options={"state_v_first": True}), torch.bfloat16, None),
    "keys-128-values-72": ("gdn", replace(PACKED, K=128, V=72), torch.bfloat16, None),
    "no-initial-state": ("gdn", replace(ROWS, initial_state=False), torch.bfloat16, None),
    "kept": ("gdn", replace(PACKED, options=RAW | {"disable_recompute": True}), torch.bfloat16, None),
    "kept-float16": ("gdn", replace(ROWS, T=70, options={"disable_recompute": True}), torch.float16, None),
    "float16": ("gdn", replace(PACKED, T=150, HV=4, lengths=(0, 75, 0, 64, 8), options=RAW), torch.float16, None),
    "scale": ("gdn", replace(ROWS, options={"scale": 0.3}), torch.float16, None),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its kernels emulated, as the choice of every call, in segments of so many tokens."""

    def chosen(length):
        emulate(monkeypatch, *KERNELS)
        monkeypatch.setattr(choices, "split_length", lambda p, processors, back: length)
        take_every_call(monkeypatch, backend.forward, backend.backward)

    return chosen


@pytest.mark.parametrize("cell", CELLS)
def test_gradients(on_cpu, cell):
    name, case, dtype, length = CELLS[cell]
    member = MEMBERS[name]
    x = make_inputs(case, member, dtype)
    wanted = truth(member, x)
    with products_in(dtype):
        reference = run(member, x, backend="torch")
    on_cpu(length)
    results = run(member, x)
    assert results.keys() == wanted.keys()
    for tensor, got in results.items():
        error, rounded = (relative_error(t, wanted[tensor]) for t in (got, reference[tensor]))
        assert error <= allowed(rounded, dtype), tensor
