"""Gradients of Kimi Delta Attention on the Hopper backend, on a GPU of that kind."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

from dataclasses import replace

import flash_delta
from flash_delta.testing import allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from tests.test_hopper_kda_backward import BOUNDED, CELLS, KDA, ROWS, SCATTERS

LONG = {
    "long": replace(ROWS, B=1, T=1000),
    "many": replace(ROWS, B=3, H=16, HV=16, T=130, options=BOUNDED),
}


@pytest.mark.parametrize("cell", [*CELLS, *LONG])
def test_against_the_recurrence(cell):
    case, dtype = (CELLS | LONG)[cell], torch.bfloat16
    x = make_inputs(case, KDA, dtype)
    wanted = truth(KDA, x)
    with products_in(dtype):
        reference = run(KDA, x, backend="torch")
    on_gpu = make_inputs(case, KDA, dtype, "cuda")
    results = run(KDA, on_gpu, backend="hopper")
    for tensor, got in results.items():
        error, rounded = (relative_error(t.cpu(), wanted[tensor]) for t in (got, reference[tensor]))
        assert error <= max(allowed(rounded, dtype), SCATTERS.get(tensor, 0.0)), tensor
    for _ in range(100 if cell in LONG else 20):
        again = run(KDA, on_gpu, backend="hopper")
        assert all(torch.equal(again[tensor], got) for tensor, got in results.items())


def test_no_number_of_rows_compiles_anything():
    def call(B):
        run(KDA, make_inputs(replace(ROWS, B=B, H=32, HV=32), KDA, torch.bfloat16, "cuda"), backend="hopper")

    call(1)
    with flash_delta.forbid_compilation():
        for B in (2, 5, 3):
            call(B)
