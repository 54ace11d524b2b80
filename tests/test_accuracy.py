"""Every op, output and gradient against the recurrence in float64, on every named case."""

import pytest
import torch

from flash_delta.testing import (
    CASES,
    MEMBERS,
    allowed,
    assert_accurate,
    make_inputs,
    products_in,
    relative_error,
    run,
    truth,
)

ROWS = [
    pytest.param(case, member, id=f"{name}-{case.name}")
    for name, member in MEMBERS.items()
    for case in CASES
    if case.applies(member)
]
SMOKE = [row for row in ROWS if row.values[0].smoke]


def check(case, member, dtype):
    inputs = make_inputs(case, member, dtype)
    want = truth(member, inputs)
    got = run(member, inputs)
    assert got.keys() == want.keys()
    for name in want:
        assert_accurate(name, got[name], want[name], dtype)


@pytest.mark.parametrize(("case", "member"), ROWS)
def test_float64(case, member):
    check(case, member, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "member"), SMOKE)
def test_working_dtypes(case, member, dtype):
    check(case, member, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_realistic_heads_and_gates(name, dtype):
    """K = V = 128, gates over the usual initial range: also the gates' parameters are right to rounding (R15)."""
    member = MEMBERS[name]
    gen = torch.Generator().manual_seed(0)
    B, T, H, HV, D = 1, 320, 1, 2, 128
    per_head = HV * (D if member.gate == "channel" else 1)
    dt = torch.empty(per_head).uniform_(0.001, 0.1, generator=gen)
    x = {
        "q": torch.randn(B, T, H, D, generator=gen),
        "k": torch.randn(B, T, H, D, generator=gen),
        "v": torch.randn(B, T, HV, D, generator=gen),
        "g": torch.randn(B, T, HV, *([D] if member.gate == "channel" else []), generator=gen),
        "beta": torch.randn(B, T, HV, generator=gen),
    }
    x = {n: t.to(dtype) for n, t in x.items()}
    x |= {"A_log": torch.tensor([0.01, 16.0]).log(), "dt_bias": dt + torch.log(-torch.expm1(-dt))}
    x = {n: t.requires_grad_() for n, t in x.items()}
    x |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    x["output_final_state"] = True
    want, got = truth(member, x), run(member, x)
    for n in want:
        assert_accurate(n, got[n], want[n], dtype)


def test_products_in_a_dtype_round_operands_and_nothing_else():
    gen = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(2, 8, 8, generator=gen) for _ in range(3))
    rounded = x.bfloat16().float() @ y.bfloat16().float()
    with products_in(torch.bfloat16):
        assert torch.equal(x @ y, rounded)
        assert torch.equal(x[0] @ y[0], rounded[0])
        added, out = torch.baddbmm(z, x, y), torch.empty_like(z)
        torch.bmm(x, y, out=out)
        in_place = z.clone().baddbmm_(x, y)
    assert relative_error(added, z + rounded) < 1e-7
    assert torch.equal(out, rounded)
    assert torch.equal(in_place, added)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_what_a_kernel_may_be_off_by(name):
    """The roundings of products show in outputs, states and gradients, also in those that are float32."""
    member = MEMBERS[name]
    inputs = make_inputs(next(case for case in CASES if case.name == "in-kernel"), member, torch.bfloat16)
    want = truth(member, inputs)
    with products_in(torch.bfloat16):
        reference = run(member, inputs, "torch")
    errors = {n: relative_error(reference[n], want[n]) for n in want}
    assert all(1.5e-3 < error < 1e-2 for error in errors.values()), errors
    assert all(error < allowed(error, torch.bfloat16) < 2.5e-2 for error in errors.values())
    assert allowed(0.0, torch.float32) == 5e-7


def test_the_comparison_can_fail():
    x = torch.randn(10)
    assert relative_error(x * (1 + 1e-3), x) == pytest.approx(1e-3, rel=1e-3)
    for bad in (x * 1.001, x.roll(1), torch.full_like(x, float("nan")), x[:5]):
        with pytest.raises(AssertionError):
            assert_accurate("x", bad, x, torch.float32)
    with pytest.raises(AssertionError):
        assert_accurate("x", torch.full((3,), 1e-20), torch.zeros(3), torch.float32)
