"""Makes Triton's interpreter take less time, with the same bits.

Nearly all of its time is Python's. For each operation it makes types, shapes and constants again, asks for their names
one after the other, and fills blocks with one number. Here types share what follows from a shape, arithmetic of two
tensors of one type is numpy's, and numpy broadcasts.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_original = SimpleNamespace(
    unwrap=core._unwrap_if_constexpr,
    computation_type=TritonSemantic.computation_type_impl,
    operands=TritonSemantic.binary_op_type_checking_impl,
    broadcast=TritonSemantic.broadcast_impl_value,
    np_dtype=interpreter._get_np_dtype,
)


def hasten_interpreter() -> None:
    """Has to be called before the first launch. It may be called repeatedly."""
    core._unwrap_if_constexpr = _unwrap
    core.dtype.__eq__ = _same_type
    core.block_type.__init__ = _block_type
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = _tensor
    TensorHandle.__init__ = _handle
    TritonSemantic.computation_type_impl = _computation_type
    TritonSemantic.binary_op_type_checking_impl = _operands
    TritonSemantic.broadcast_impl_value = _broadcast
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_attr = _patch_attr


_BARE = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}


def _unwrap(o: Any) -> Any:
    kind = type(o)
    if kind is core.constexpr:
        return o.value
    return o if kind in _BARE else _original.unwrap(o)


def _same_type(self: core.dtype, other: Any) -> bool:
    if self is other:
        return True
    other = _unwrap(other)
    return isinstance(other, core.dtype) and self.name == other.name


@cache
def _facts(shape: tuple[int, ...]) -> dict[str, Any]:
    """What a block's type and its tensors know from their shape."""
    if not shape:
        raise TypeError("shape: expected at least one axis, got none")
    numel, of_type, of_tensor = core.validate_block_shape(shape), core.tuple(shape), [core.constexpr(d) for d in shape]
    tensor = {"tensor_shape": core.tuple(of_tensor), "tensor_numel": core.constexpr(numel)}
    return {"shape": of_type, "numel": numel, "sizes": shape, "text": str(of_type), **tensor}


def _block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    self.__dict__ = _facts(tuple([_unwrap(d) for d in shape])).copy()
    self.element_ty, self.name = element_ty, f"<{self.text}, {element_ty.name}>"


_NO_AXES, _ONE = core.tuple([]), core.constexpr(1)


def _tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type = handle, type
    if isinstance(type, core.block_type):
        self.dtype, self.shape, self.numel = type.element_ty, type.tensor_shape, type.tensor_numel
    else:
        self.dtype, self.shape, self.numel = type.scalar, _NO_AXES, _ONE


def _handle(self: TensorHandle, data: np.ndarray, dtype: core.dtype, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not isinstance(dtype, core.pointer_type) and data.itemsize * 8 != dtype.primitive_bitwidth:
        self.__post_init__()  # it refuses data that are too wide


@cache
def _computation_type(*arguments: Any) -> core.dtype:
    return _original.computation_type(*arguments)


_NP_DTYPES: dict[str, np.dtype] = {}


def _np_dtype(tt_dtype: core.dtype) -> np.dtype:
    scalar = tt_dtype.scalar
    if isinstance(scalar, core.pointer_type):
        return _original.np_dtype(scalar)
    if scalar.name not in _NP_DTYPES:
        _NP_DTYPES[scalar.name] = _original.np_dtype(scalar)
    return _NP_DTYPES[scalar.name]


def _broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    return (lhs, rhs) if lhs.shape is rhs.shape else _original.broadcast(self, lhs, rhs)


_FLOATS, _INTEGERS = {"fp16", "fp32", "fp64"}, {"int32": 2**31, "int64": 2**63}


def _pair(lhs: core.tensor, rhs: Any) -> tuple[core.tensor, core.tensor] | None:
    """Returns two tensors of one type for numpy, which broadcasts them: the type is the result's. None: ask Triton."""
    name = lhs.dtype.name
    if type(rhs) is core.tensor:
        if rhs.dtype.name != name:
            if name not in _INTEGERS or rhs.dtype.name not in _INTEGERS:
                return None
            lhs, rhs = _long(lhs), _long(rhs)
    elif (name in _FLOATS and type(rhs) in (float, int)) or (
        name in _INTEGERS and type(rhs) is int and -_INTEGERS[name] <= rhs < _INTEGERS[name]
    ):
        rhs = core.tensor(TensorHandle(np.array([rhs], _np_dtype(lhs.dtype)), lhs.dtype), lhs.dtype)
    else:
        return None
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if rhs.shape is _NO_AXES:
        return lhs, core.tensor(rhs.handle, lhs.type)
    if lhs.shape is _NO_AXES:
        return core.tensor(lhs.handle, rhs.type), rhs
    sizes = _joint(lhs.type.sizes, rhs.type.sizes)
    if sizes is None:
        return None
    joint = core.block_type(lhs.dtype, sizes)
    return core.tensor(lhs.handle, joint), core.tensor(rhs.handle, joint)


def _long(x: core.tensor) -> core.tensor:
    if x.dtype.name == "int64":
        return x
    made = x.type.with_element_ty(core.int64) if isinstance(x.type, core.block_type) else core.int64
    return core.tensor(TensorHandle(x.handle.data.astype(np.int64), core.int64), made)


def _moved(pointers: core.tensor, by: Any) -> core.tensor | None:
    """Returns the pointers so many elements further on. None: ask Triton."""
    if type(by) is int:
        offsets, made = by, pointers.type
    elif type(by) is core.tensor and by.dtype.name in _INTEGERS:
        offsets, made = by.handle.data.astype(np.int64), pointers.type
        if by.shape is not pointers.shape and by.shape is not _NO_AXES:
            sizes = by.type.sizes if pointers.shape is _NO_AXES else _joint(pointers.type.sizes, by.type.sizes)
            if sizes is None:
                return None
            made = core.block_type(pointers.dtype, sizes)
    else:
        return None
    size = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
    addresses = pointers.handle.data + np.multiply(offsets, size, dtype=np.int64).view(np.uint64)
    return core.tensor(TensorHandle(addresses, pointers.dtype), made)


@cache
def _joint(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    fits = len(a) == len(b) and all(i == j or 1 in (i, j) for i, j in zip(a, b, strict=True))
    return tuple(map(max, a, b)) if fits else None


def _operands(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **names: bool) -> tuple[core.tensor, core.tensor]:
    """Replaces Triton's method. What it returns goes into one operation of numpy."""
    plain = len(flags) < 4 and not names and type(lhs) is core.tensor
    if plain and (lhs.dtype.name in _FLOATS or lhs.dtype.name in _INTEGERS) and (pair := _pair(lhs, rhs)):
        return pair
    return _original.operands(self, lhs, rhs, *flags, **names)


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISON = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or}
_NUMBERS, _BITS = _FLOATS | {*_INTEGERS}, {"int1", *_INTEGERS}
_QUICK = {
    f"__{name}__": (of_numpy, types, of_numpy in _COMPARISON.values())
    for table, types in ((_ARITHMETIC, _NUMBERS), (_COMPARISON, _NUMBERS), (_BITWISE, _BITS))
    for name, of_numpy in table.items()
}


def _quick(name: str, of_triton: Callable) -> Callable:
    """Returns a method of tensors that has numpy's operation where both are of one type, otherwise Triton's."""
    of_numpy, types, compares = _QUICK[name]

    def call(self: core.tensor, other: Any, **names: Any) -> Any:
        if name == "__add__" and isinstance(self.dtype, core.pointer_type):
            moved = _moved(self, _unwrap(other))
            return of_triton(self, other, **names) if moved is None else moved
        pair = _pair(self, _unwrap(other)) if self.dtype.name in types else None
        if pair is None:
            return of_triton(self, other, **names)
        lhs, rhs = pair
        made = lhs.type
        if compares:
            made = core.block_type(core.int1, made.sizes) if isinstance(made, core.block_type) else core.int1
        return core.tensor(TensorHandle(of_numpy(lhs.handle.data, rhs.handle.data), made.scalar), made)

    return call


_CHECKED = core.add.__code__  # of what `builtin` makes: it asks whether there is a semantic


def _patch_attr(obj: Any, name: str, member: Callable, builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic
    function = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*arguments: Any, **names: Any) -> Any:
        names["_semantic"] = semantic
        return function(*arguments, **names)

    scope.set_attr(obj, name, _quick(name, call) if obj is core.tensor and name in _QUICK else call)
