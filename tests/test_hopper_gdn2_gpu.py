"""GDN-2 on the Hopper backend, on a GPU of that kind."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

from dataclasses import replace

import flash_delta
from flash_delta.testing import allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from flash_delta.testing.accuracy import run as run_op
from tests.test_hopper_gdn2 import BACK, CELLS, GDN2, LOGS, RAW, ROWS, SCATTERS, TRAINING, WIDE, inputs_of
from tests.test_hopper_kda_gpu import no_known_calls, walking  # noqa: F401 (fixtures)

LONG = {
    "long": replace(ROWS, B=1, H=2, HV=4, T=2000),
    "many": replace(ROWS, B=5, H=16, HV=32, T=130, options=RAW),
    "many-steep": replace(ROWS, B=5, H=16, HV=32, T=130, options=LOGS, decay="strong"),
}
LONG_TRAINING = TRAINING | {
    "long": (replace(ROWS, B=1, H=2, HV=2, T=1500, options=LOGS), torch.bfloat16),
    "many": (replace(ROWS, B=3, H=16, HV=16, T=130, options=RAW), torch.bfloat16),
    "many-steep": (replace(ROWS, B=2, H=8, HV=16, T=130, options=LOGS, decay="strong"), torch.float32),
}


@pytest.mark.parametrize(
    ("cell", "g_dtype"),
    [*((cell, torch.bfloat16) for cell in (*CELLS, *LONG)), *((cell, torch.float32) for cell in (*WIDE, *LONG))],
)
@torch.no_grad()
def test_against_the_recurrence(walking, cell, g_dtype):  # noqa: F811
    case, dtype = (CELLS | LONG)[cell], torch.bfloat16
    x = inputs_of(case, g_dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(GDN2, wide, x)
    with products_in(dtype):
        reference = GDN2.op(**x, backend="torch")
    on_gpu = inputs_of(case, g_dtype, device="cuda")
    assert flash_delta.explain(GDN2.op, **on_gpu).backend == "hopper"
    results = GDN2.op(**on_gpu)
    for got, want, rounded in zip(results, wanted, reference, strict=True):
        assert relative_error(got.cpu(), want) <= allowed(relative_error(rounded, want), dtype)
    for _ in range(100 if cell in LONG else 20):
        assert all(map(torch.equal, GDN2.op(**on_gpu), results))


@pytest.mark.parametrize("cell", [*LONG_TRAINING, *BACK])
def test_gradients(cell):
    case, g_dtype = LONG_TRAINING.get(cell) or (BACK[cell], torch.bfloat16)
    want = truth(GDN2, inputs_of(case, g_dtype))
    with products_in(torch.bfloat16):
        reference = run_op(GDN2, inputs_of(case, g_dtype), "torch")
    on_gpu = inputs_of(case, g_dtype, device="cuda")
    got, like = run_op(GDN2, on_gpu, "hopper"), run_op(GDN2, on_gpu, "triton")
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), torch.bfloat16)
        limit = max(limit, 1.2 * relative_error(like[tensor].cpu(), value), SCATTERS.get(tensor, 0.0))
        assert relative_error(got[tensor].cpu(), value) <= limit, tensor
    for _ in range(20 if cell in TRAINING else 100):
        assert all(map(torch.equal, run_op(GDN2, on_gpu, "hopper").values(), got.values()))


def test_no_number_of_rows_compiles_anything():
    def call(B):
        case = replace(ROWS, B=B, H=32, HV=32)
        run_op(GDN2, make_inputs(case, GDN2, torch.bfloat16, "cuda"), "hopper")

    call(1)
    with flash_delta.forbid_compilation():
        for B in (2, 5, 3):
            call(B)
