"""Triton kernels on CPU tensors, in Triton's interpreter: right for bfloat16 only because it is repaired."""
# ruff: noqa: E402 (what is imported below needs Triton)

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: kernels are compiled", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from flash_delta.testing import relative_error
from workshop.check import interpreter
from workshop.gate.cases import rule
from workshop.tune.stages import STAGES

# A product's operands are rounded to the inputs' type once more on the way: a few roundings of the result.
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=str)


@triton.jit
def product(a, b, o, steps, N: tl.constexpr):
    r = tl.arange(0, N)
    at = r[:, None] * N + r[None, :]
    acc = tl.zeros([N, N], tl.float32)
    for _ in range(steps):
        acc = tl.dot(tl.load(a + at), tl.load(b + at), acc)
    tl.store(o + at, acc)


@triton.jit
def arithmetic(a, b, o, N: tl.constexpr):
    r = tl.arange(0, N)
    x, y = tl.load(a + r), tl.load(b + r)
    tl.store(o + r, tl.where(x > y, x * y, tl.abs(x) - y).to(tl.float32).to(o.dtype.element_ty))


def error_of_product(dtype):
    a, b, o = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.empty(16, 16)
    product[(1,)](a, b, o, 2, N=16)
    return relative_error(o, 2 * a.double() @ b.double())


@DTYPES
def test_product(dtype):
    assert error_of_product(dtype) < 1e-6


def test_the_repair_is_still_needed(monkeypatch):
    """When this fails, Triton multiplies bfloat16 by itself: interpreter.py can go."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreter._original_dot)
    assert error_of_product(torch.bfloat16) > 1


def test_repairing_twice_changes_nothing():
    interpreter.repair_interpreter()
    interpreter.repair_interpreter()
    assert error_of_product(torch.bfloat16) < 1e-6


@DTYPES
def test_arithmetic_is_rounded_as_in_torch(dtype):
    a, b = torch.randn(1024).to(dtype), torch.randn(1024).to(dtype)
    o = torch.empty_like(a)
    arithmetic[(1,)](a, b, o, N=1024)
    assert torch.equal(o, torch.where(a > b, a * b, a.abs() - b))


@triton.jit
def bounds(x, o, N: tl.constexpr):
    r = tl.arange(0, N)
    y = tl.load(x + r)
    half = tl.full([N], 0.5, o.dtype.element_ty)
    tl.store(o + r, tl.maximum(tl.minimum(y, half), -half))


@DTYPES
def test_bounds_of_nan(dtype):
    """Constants in every type, and a NaN gives the bound, as on a GPU."""
    x = torch.tensor([float("nan"), 2.0, -2.0, 0.25], dtype=dtype)
    o = torch.empty_like(x)
    bounds[(1,)](x, o, N=4)
    assert o.tolist() == [0.5, 0.5, -0.5, 0.25]


@triton.jit
def mixed(a, i, o, N: tl.constexpr, OTHER: tl.constexpr):
    r, other = tl.arange(0, N), tl.arange(0, OTHER)
    x, n = tl.load(a + r), tl.load(i + r)
    rows = 2 * x[:, None] - x[None, :] * 0.5
    chosen = (rows > 0.5) & (n[:, None] != 3) | (n[None, :] <= r[:, None])
    tl.store(o + r[:, None] * N + other[None, :], tl.where(chosen, rows, n[None, :] + r[:, None] - 1))


def test_types_and_shapes_that_meet():
    """Numbers, float32, int32, int64 and comparisons with NaN, along both axes. What does not fit is refused."""
    x, n, r, o = torch.randn(16), torch.arange(16) % 7, torch.arange(16), torch.empty(16, 16)
    x[3] = float("nan")
    mixed[(1,)](x, n, o, N=16, OTHER=16)
    rows = 2 * x[:, None] - x[None, :] * 0.5
    chosen = (rows > 0.5) & (n[:, None] != 3) | (n[None, :] <= r[:, None])
    want = torch.where(chosen, rows, (n[None, :] + r[:, None] - 1).float())
    assert torch.equal(o.nan_to_num(7.5), want.nan_to_num(7.5))
    with pytest.raises(Exception, match=r"incompatible dimensions|must match the existing size"):
        mixed[(1,)](x, n, o, N=16, OTHER=8)


@triton.jit
def moving(x, o, back, far, N: tl.constexpr):
    r = tl.arange(0, N)
    rows = x + far + r[:, None] * N  # pointers of the rows' ends, in int64
    tl.store(o + r[:, None] * N + r[None, :].to(tl.int64), tl.load(rows + (back + 1) - r[None, :]) + tl.load(x + 3))


def test_pointers_move_by_offsets_of_any_sign_and_width():
    x, o = torch.randn(16, 16), torch.empty(16, 16)
    moving[(1,)](x, o, -(2**31) - 1, 2**31 + 15, N=16)
    assert torch.equal(o, x.flip(1) + x[0, 3])


@DTYPES
@pytest.mark.parametrize("name", STAGES)
def test_stages_of_the_tuner(name, dtype):
    stage, tile = STAGES[name], rule.Tile(4, 1, 16)
    T = 5 if name.startswith("decode") else 150
    made = stage.make("cpu", B=2, T=T, H=1, HV=2, K=32, V=32, dtype=dtype)
    got, want = stage.launch(made, tile), stage.truth(made)
    assert want
    limit = max(LIMIT[dtype], LIMIT[made.get("pool", made["q"]).dtype])
    for output in want:
        assert relative_error(got[output], want[output]) < limit, output
