"""Kernels that read or write beyond what they were given are found out in the interpreter (conftest.py)."""
# ruff: noqa: E402 (what is imported below needs Triton)

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, where kernels are compiled", allow_module_level=True)

import triton.language as tl


@triton.jit
def copy(x, y, shift, N: tl.constexpr, GUARDED: tl.constexpr):
    i = tl.arange(0, 4)
    value = tl.load(x + shift + i, mask=i + shift < N if GUARDED else i < 4, other=0.0)
    tl.store(y + i, value)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_read_beyond_a_tensor(shift):
    """It lies within another one of the same memory, which the kernel was not given."""
    memory = torch.arange(12.0)
    x, y = memory[4:8], torch.zeros(4)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="reads beyond its tensors: 1 of 4 addresses"):
        copy[1,](x, y, shift, 4, False)


def test_a_write_beyond_a_tensor():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="writes beyond its tensors"):
        copy[1,](torch.zeros(4), torch.zeros(3), 0, 4, False)


def test_what_a_mask_keeps_away_is_no_access():
    y = torch.zeros(4)
    copy[1,](torch.arange(4.0), y, 2, 4, True)
    assert y.tolist() == [2, 3, 0, 0]
