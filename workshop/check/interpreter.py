"""Repairs Triton's interpreter (``TRITON_INTERPRET=1``), which runs kernels on CPU tensors, and makes it faster.

The interpreter stores a bfloat16 as an unsigned integer of 16 bits. Triton 3.6 to 3.9 multiply, add and compare these
integers, so every ``tl.dot`` and all arithmetic is silently wrong. It also truncates where a GPU rounds to nearest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from workshop.check.faster import hasten_interpreter


def repair_interpreter() -> None:
    """Makes the interpreter compute bfloat16 in float32 and round the results. It may be called repeatedly.

    A kernel's float stays a float, so that its product with a constant is a constant. The quotient of a constant and a
    block is a block here, and no constant as in Triton.

    It also repairs faults of Triton 3.6. With numpy 2.4 it fails in loops up to a kernel's argument, since it takes
    ``int()`` of an array of one element. It cannot combine the comparison of two numbers with a block of comparisons,
    and it has no constants in bfloat16. Its minimum and maximum of a number and NaN are NaN. A GPU's are the number,
    unless a kernel asks for NaN.

    The interpreter also takes a fifth of its time, with the same bits: see `faster`. Before, it also patched Triton's
    language again for each launch and each helper that a kernel calls. And it checked all integer arithmetic for
    overflow, which only ``debug`` needs.
    """
    if not knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET: expected '1', set before Triton is imported, got nothing")
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.unary_op = _unary_op
    InterpreterBuilder.binary_op = _binary_op
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)
    tl.constexpr.__truediv__ = _divide
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    hasten_interpreter()


_original_dot, _original_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_original_unary_op, _original_binary_op = InterpreterBuilder.unary_op, InterpreterBuilder.binary_op
_original_divide = tl.constexpr.__truediv__
_original_patch_lang, _original_patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


def _is_bf16(x: TensorHandle) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _wide(x: TensorHandle) -> TensorHandle:
    """The float32 values of bfloat16 bits. Other types are returned as they are."""
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if _is_bf16(x) else x


def _narrow(x: TensorHandle) -> TensorHandle:
    """The bfloat16 bits of float32 values, rounded to nearest as on a GPU. Results of comparisons are not changed."""
    if x.data.dtype != np.float32:
        return x
    bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _original_dot(self, _wide(a), _wide(b), *rest)


def _cast(self: InterpreterBuilder, x: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    if dst_type.scalar == tl.bfloat16:
        return x if _is_bf16(x) else _narrow(_original_cast(self, x, tl.float32))
    return _original_cast(self, _wide(x), dst_type)


def _unary_op(self: InterpreterBuilder, x: TensorHandle, op: Callable) -> TensorHandle:
    result = _original_unary_op(self, _wide(x), op)
    return _narrow(result) if _is_bf16(x) else result


def _binary_op(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
    result = _original_binary_op(self, _wide(lhs), _wide(rhs), op)
    if result.data.dtype == np.bool_:  # the interpreter gives a comparison the type of its operands
        return TensorHandle(result.data, tl.int1)
    return _narrow(result) if _is_bf16(lhs) else result


def _divide(self: tl.constexpr, other: Any) -> Any:
    quotient = _original_divide(self, other)
    return quotient.value if isinstance(quotient.value, tl.tensor) else quotient


def _patch_lang_tensor(tensor: type, scope: Any) -> None:
    _original_patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


@cache
def _patch_all() -> None:
    _original_patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_lang(fn: Callable) -> Any:
    """Patches Triton's language once, for all kernels and launches. Nothing is restored."""
    _patch_all()
    return interpreter._LangPatchScope()
