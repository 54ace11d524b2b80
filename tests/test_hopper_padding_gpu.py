"""Heads of other widths than 64 and 128 on the Hopper backend, on a GPU of that kind."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

from flash_delta.kernels.hopper.scalar import choices
from flash_delta.ops import _known_calls
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, run, truth
from tests.test_hopper_padding import CELLS

GDN = MEMBERS["gdn"]
SEGMENTS = [None, 64]


@pytest.fixture(params=SEGMENTS, ids=["whole", "segments"])
def split(request, monkeypatch):
    """Tokens of a segment."""
    length = request.param
    monkeypatch.setattr(choices, "split_length", lambda p, processors, back: length)
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())  # they know what they have launched
    return length


@pytest.mark.parametrize("cell", CELLS)
def test_gradients(split, cell):
    name, case, dtype, _ = CELLS[cell]
    member = MEMBERS[name]
    wanted = truth(member, make_inputs(case, member, dtype))
    with products_in(dtype):
        reference = run(member, make_inputs(case, member, dtype), backend="torch")
    calls = [run(member, make_inputs(case, member, dtype, "cuda"), "hopper") for _ in range(3)]
    for tensor, want in wanted.items():
        limit = allowed(relative_error(reference[tensor], want), dtype)
        assert relative_error(calls[0][tensor].cpu(), want) <= limit, tensor
        assert all(torch.equal(calls[0][tensor], call[tensor]) for call in calls), tensor


@pytest.mark.parametrize("width", [100, 96])
def test_the_bits_are_those_of_a_call_whose_caller_pads(width):
    """q, k and v are slices of a projection, states are bfloat16, and final states have gradients."""
    T, H, HV = 1000, 2, 4
    rows = torch.randn(2, T, 2 * H + HV, width, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.detach().requires_grad_() for t in rows.split((H, H, HV), 2))
    g, beta = (torch.rand(2, T, HV, device="cuda") for _ in range(2))
    state = torch.randn(2, HV, width, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "scale": width**-0.5, "backend": "hopper"}

    def results(more):
        def wide(t, axes=1):
            return torch.nn.functional.pad(t, (0, more) * axes)

        o, final = GDN.op(wide(q), wide(k), wide(v), -g, beta, initial_state=wide(state, 2), **options)
        o, final = o[..., :width], final[..., :width, :width]
        loss = (o.float() * torch.linspace(-1, 1, width, device="cuda")).sum() + final.square().sum()
        return o, final, *torch.autograd.grad(loss, (q, k, v, state))

    for got, want in zip(results(0), results(128 - width), strict=True):
        assert torch.equal(got, want)
