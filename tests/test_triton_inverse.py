"""A, the inverse of a chunk, in Triton's kernels: how it is kept, what it is multiplied by, and what follows where keys
repeat. In Triton's interpreter; on a GPU: `flash-delta check`."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: `flash-delta check --device cuda` runs the compiled kernels", allow_module_level=True)

import triton
import triton.language as tl

from flash_delta import chunk_delta_rule, chunk_gated_delta_rule, chunk_kda
from flash_delta.kernels.triton.forward.products import times_inverse, unit_of
from flash_delta.problem import Inputs
from flash_delta.testing import relative_error
from workshop.gate.cases.members import describe
from workshop.gate.cases.rule import Kernels


@triton.jit
def store_unit(x, units, inverses, N: tl.constexpr):
    i = tl.arange(0, N)
    unit, inverse = unit_of(tl.load(x + i))
    tl.store(units + i, unit)
    tl.store(inverses + i, inverse)


def test_a_unit_is_a_power_of_two_and_makes_nothing_infinite():
    x = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-20, 0.75, 1.0, 65504.0, 3.4e38])
    unit, inverse = torch.empty_like(x), torch.empty_like(x)
    store_unit[(1,)](x, unit, inverse, len(x))
    assert torch.equal(unit.frexp().mantissa, torch.full_like(x, 0.5))
    assert torch.equal(unit * inverse, torch.ones_like(x))
    assert (x * inverse < 2.0**15).all()
    usual = slice(3, -1)
    assert (x * inverse >= 2.0**14)[usual].all()
    assert torch.equal(x[usual] * inverse[usual] * unit[usual], x[usual])


@triton.jit
def store_product(x, a, out, UNIT_DIAGONAL: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    m = tl.arange(0, 64)[:, None]
    product = times_inverse(tl.load(x + i * 64 + j), tl.load(a + m * 64 + j), UNIT_DIAGONAL, "ieee")
    tl.store(out + i * 64 + j, product)


@pytest.mark.parametrize("unit_diagonal", [False, True])
def test_rows_of_any_size_are_multiplied_by_the_inverse(unit_diagonal):
    """Rows differ by 60 powers of ten, and one of them is zero."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=gen) * 10.0 ** torch.linspace(-30, 30, 16)[:, None]
    x[3] = 0
    a = torch.randn(64, 64, generator=gen).half()
    out = torch.empty_like(x)
    store_product[(1,)](x, a, out, unit_diagonal)
    want = x.double() @ a.double() + (x.double() if unit_diagonal else 0)
    error = (out - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-300)
    assert error.max() < 5e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_key_again_and_again_shrinks_a_state(dtype):
    """A chunk multiplies the state along its only key by (1 - b)^64. In bfloat16 A would make -2.4 of 0.94."""
    strengths = torch.tensor([0.5, 0.9, 1.5, 1.9, 1.95, 1.99, 1.999, 2.0])
    k = torch.zeros(1, 64, 1, 16, dtype=dtype)
    k[..., 0] = 1
    v, b = torch.zeros(1, 64, 8, 16, dtype=dtype), strengths.expand(1, 64, 8).contiguous()
    x = Inputs(k, k, v, None, b)
    kernels = Kernels(describe(x, gate="none"), x)
    kernels.solve()
    A = kernels.launch(kernels.solved)["A"][0]
    assert A.dtype == torch.float16
    factor = 1 - (A.double() * strengths.double()[:, None, None]).sum((1, 2))
    assert (factor - (1 - strengths.double()) ** 64).abs().max() < 0.06
    assert factor.abs().max() < 1 + 1e-9


def repeated(member: str, beta: float, dtype: torch.dtype, tokens: int = 128):
    """Inputs of one head with one key, without decays, and gradients of o and S. Keys differ in length, except with a
    decay per channel, where rounding their products would hide how A is rounded."""
    gen = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    unit = torch.nn.functional.normalize
    lengths = 0.5 + 1.5 * torch.rand(2, tokens, 1, generator=gen)
    if member == "kda":
        lengths[1] = 1
    q, k = unit(new(tokens, 32), dim=-1) * lengths[0], unit(new(32), dim=-1) * lengths[1]
    x = {name: t.to(dtype)[None, :, None] for name, t in (("q", q), ("k", k), ("v", new(tokens, 16)))}
    if member != "delta":
        x["g"] = torch.zeros((1, tokens, 1, 32) if member == "kda" else (1, tokens, 1))
    x |= {"beta": torch.full((1, tokens, 1), beta), "initial_state": 4 * new(1, 1, 32, 16)}
    return x, (new(1, tokens, 1, 16).to(dtype), new(1, 1, 32, 16))


def results(member: str, x, ends, backend: str, norm: bool = True, **options):
    op = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda, "delta": chunk_delta_rule}[member]
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, S = op(**x, output_final_state=True, use_qk_l2norm_in_kernel=norm, backend=backend, **options)
    made = torch.autograd.grad([o, S], list(x.values()), [end.to(t.dtype) for end, t in zip(ends, (o, S), strict=True)])
    return {"o": o, "S": S} | {f"d{name}": t for name, t in zip(x, made, strict=True)}


@pytest.mark.parametrize(
    ("member", "dtype", "options"),
    [
        ("gdn", torch.bfloat16, {}),
        ("gdn", torch.bfloat16, {"disable_recompute": True}),
        ("delta", torch.float16, {}),
        ("kda", torch.bfloat16, {}),
    ],
)
def test_repeated_keys(member, dtype, options):
    """Errors stay small where a state forgets nothing and every token writes along the same key."""
    x, ends = repeated(member, 1.999, dtype)
    want = results(member, {name: t.double() for name, t in x.items()}, ends, "torch")
    got = results(member, x, ends, "triton", **options)
    for name, value in want.items():
        assert relative_error(got[name], value) < 0.2, name


@pytest.mark.parametrize(("member", "keys"), [("gdn", 2.0**20), ("kda", 1.0)])
def test_numbers_beyond_the_range_of_float16(member, keys):
    """Long keys with weak strengths, and large values: bfloat16 holds them, and so A's partners have units."""
    x, ends = repeated(member, 0.9, torch.bfloat16, tokens=64)
    x["k"] = (torch.nn.functional.normalize(x["k"].float(), dim=-1) * keys).bfloat16()
    x |= {"v": x["v"] * 2.0**60, "beta": x["beta"] * keys**-2, "initial_state": x["initial_state"] * (2.0**60 / keys)}
    want = results(member, {name: t.double() for name, t in x.items()}, ends, "torch", norm=False)
    got = results(member, x, ends, "triton", norm=False)
    for name in ("o", "S", "dk", "dv", "dbeta"):
        assert relative_error(got[name], want[name]) < 0.1, name


@pytest.mark.parametrize("length", [1.05, 2.0**0.5])
def test_an_inverse_beyond_the_range_of_float16_is_finite(length):
    """One key with |k|^2 b above 2 and no decay lets a state grow, and A with it: to 2e5, and to 3^63."""
    x, ends = repeated("gdn", 2.0, torch.bfloat16, tokens=64)
    x["k"] = (torch.nn.functional.normalize(x["k"].float(), dim=-1) * length).bfloat16()
    for name, t in results("gdn", x, ends, "triton", norm=False).items():
        assert t.isfinite().all(), name


@pytest.mark.parametrize("member", ["gdn", "kda"])
def test_long_keys_whose_state_decays(member):
    """|k|^2 b is 4, so a token multiplies the state along its key by -3, and a decay by 1 / 3 holds it."""
    x, ends = repeated(member, 2.0, torch.bfloat16, tokens=128)
    x["k"] = (torch.nn.functional.normalize(x["k"].float(), dim=-1) * 2.0**0.5).bfloat16()
    x["g"] -= 1.1
    want = results(member, {name: t.double() for name, t in x.items()}, ends, "torch", norm=False)
    got = results(member, x, ends, "triton", norm=False)
    for name, value in want.items():
        assert relative_error(got[name], value) < 0.05, name
