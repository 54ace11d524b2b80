"""Kimi Delta Attention on the Hopper backend, on a GPU of that kind."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

from dataclasses import replace

import flash_delta
from flash_delta.kernels.hopper.channel import run
from flash_delta.testing import allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence
from tests.hostile_bounds import HOSTILE, T, hostile
from tests.test_hopper_kda import CELLS, KDA, PACKED, ROWS

LONG = {"long": replace(ROWS, B=1, H=2, HV=4, T=4000), "many": replace(ROWS, B=5, H=16, HV=32, T=130)}


@pytest.fixture(params=[True, False], ids=["walk", "scan"])
def walking(request, monkeypatch):
    monkeypatch.setattr(run, "walks_by_hand", lambda p, chip: request.param)
    monkeypatch.setattr(run, "FORWARD", ("hopper", "channel", request.param))  # its own: launches are remembered


@pytest.mark.parametrize("cell", [*CELLS, *LONG])
@torch.no_grad()
def test_against_the_recurrence(walking, cell):
    case, dtype = (CELLS | LONG)[cell], torch.bfloat16
    x = make_inputs(case, KDA, dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(KDA, wide, x)
    with products_in(dtype):
        reference = KDA.op(**x, backend="torch")
    on_gpu = make_inputs(case, KDA, dtype, "cuda")
    assert flash_delta.explain(KDA.op, **on_gpu).backend == "hopper"
    results = KDA.op(**on_gpu)
    for got, want, rounded in zip(results, wanted, reference, strict=True):
        assert relative_error(got.cpu(), want) <= allowed(relative_error(rounded, want), dtype)
    for _ in range(20):
        assert all(map(torch.equal, KDA.op(**on_gpu), results))


@pytest.mark.parametrize("name", HOSTILE)
@torch.no_grad()
def test_wrong_bounds_touch_no_memory_but_the_calls(walking, name):
    """A call after it is right."""
    bounds = hostile(name, "cuda")
    case = replace(PACKED, T=T, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, KDA, torch.bfloat16, "cuda")
    KDA.op(**x | {"cu_seqlens": bounds})
    torch.cuda.synchronize()
    wide = {n: t.double().cpu() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    want, _ = recurrence(KDA, wide, {n: t.cpu() if torch.is_tensor(t) else t for n, t in x.items()})
    assert relative_error(KDA.op(**x)[0].cpu(), want) < 2e-2


@torch.no_grad()
def test_no_number_of_states_compiles_anything():
    def inputs(B):
        return make_inputs(replace(ROWS, B=B, H=32, HV=32), KDA, torch.bfloat16, "cuda")

    KDA.op(**inputs(1))
    with flash_delta.forbid_compilation():
        for B in (2, 5, 3):
            KDA.op(**inputs(B))
