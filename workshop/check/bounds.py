"""Watches reads and writes of kernels in Triton's interpreter. An access outside of the kernel's tensors is an error.

On a GPU such a read goes unnoticed as long as memory beside the tensor is mapped, because its value may be masked
later. Results are then right, until a tensor lies at the end of the allocator's memory.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def watch_bounds() -> None:
    """Watches all kernels that start from now on. It may be called repeatedly."""
    GridExecutor._init_args_hst = _init_args
    InterpreterBuilder.create_masked_load = _load
    InterpreterBuilder.create_masked_store = _store


_original_init_args = GridExecutor._init_args_hst
_original_load, _original_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
_given = np.empty((2, 0), np.uint64)  # first addresses of the running kernel's tensors, and the furthest ends so far


def _init_args(self: GridExecutor, args: Any, kwargs: Any) -> tuple[list, dict]:
    """Replaces the interpreter's method, which returns the tensors whose addresses the kernel gets."""
    global _given
    on_host = _original_init_args(self, args, kwargs)
    regions = sorted(set(_regions((*on_host[0], *on_host[1].values()))))
    _given = np.array(regions, np.uint64).reshape(-1, 2).T.copy()
    np.maximum.accumulate(_given[1], out=_given[1])  # a view may begin inside of another one
    return on_host


def _regions(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The first and last address of every tensor's elements, including gaps between them."""
    for value in values:
        if isinstance(value, tuple):
            yield from _regions(value)
        elif hasattr(value, "block_shape"):  # a descriptor
            yield from _regions((value.base,))
        elif hasattr(value, "data_ptr") and value.numel():
            reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            yield value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()


def _check(what: str, pointers: TensorHandle, mask: TensorHandle) -> None:
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    if _in_one_tensor(pointers.data, size):  # mostly so, even with those that the mask leaves out
        return
    addresses, wanted = np.broadcast_arrays(pointers.data, mask.data)
    addresses = addresses[wanted.astype(bool)].astype(np.uint64)
    if not addresses.size or _in_one_tensor(addresses, size):
        return
    starts, ends = _given
    before = np.searchsorted(starts, addresses, side="right")  # how many tensors begin at an address or before it
    outside = (before == 0) | (addresses + np.uint64(size) > np.append(ends, 0)[before - 1])
    if outside.any():
        raise IndexError(f"a kernel {what} beyond its tensors: {outside.sum()} of {addresses.size} addresses")


def _in_one_tensor(addresses: np.ndarray, size: int) -> bool:
    starts, ends = _given
    before = starts.searchsorted(addresses.min(), side="right")
    return bool(before) and int(addresses.max()) + size <= ends[before - 1]


def _load(self: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: Any, **names: Any) -> Any:
    _check("reads", pointers, mask)
    return _original_load(self, pointers, mask, *rest, **names)


def _store(self: InterpreterBuilder, pointers: TensorHandle, value: Any, mask: TensorHandle, *rest: Any) -> Any:
    _check("writes", pointers, mask)
    return _original_store(self, pointers, value, mask, *rest)
