"""A call's launches and memory as values. A plan is made from a problem and from layouts, and never from tensors.

A step names its tensors: those that the caller gives, and those that the plan makes. So a step reads the same tensor
whether two tensors of a call are one object or not, and wherever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.runtime.chip import Tile


@dataclass(slots=True)
class Layout:
    """Everything about a tensor except its numbers and its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0  # of the address, from a multiple of 16 bytes

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True


class Memory(NamedTuple):
    """A contiguous tensor that is made for a call. Only the call's steps use it, unless it is a result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    filled: str | float | None = None  # before the first step: with a given tensor's numbers, or with this number
    offset: int = 0  # as Layout.offset


class Step(NamedTuple):
    """One launch."""

    kernel: Any
    grid: tuple[int, int, int]
    tile: Tile
    arguments: tuple[Any, ...]  # the parameters before the constants: names of tensors, numbers, None, tuples of these
    constants: dict[str, Any]
    follows: bool = False  # the kernel before it is of the same call and may still run (chunk.follow)
    contracts: bool = True  # the compiler may fuse a product and a sum, with one rounding


class Plan(NamedTuple):
    """What a call makes, and what it launches, in order."""

    steps: tuple[Step, ...]
    memory: tuple[Memory, ...]
    results: tuple[str | None, ...]  # what `run` returns: memory or given tensors; None stays None

    @property
    def workspace_bytes(self) -> int:
        """The bytes that are made besides results."""
        return sum(size_of(m) for m in self.memory if m.name not in self.results)


def size_of(m: Memory) -> int:
    """The bytes that it takes in an allocation."""
    return -(-prod(m.shape) * m.dtype.itemsize // 256) * 256


def layout_of(t: Tensor | None) -> Layout | None:
    return None if t is None else Layout(t.shape, t.stride(), t.dtype, t.data_ptr() % 16)


def names_of(group: tuple[Any, ...]) -> dict[str, str | None]:
    """A group's tensors by their names; None for those that are not given."""
    return {name: None if t is None else name for name, t in zip(group._fields, group, strict=True)}


def resolved(arguments: tuple[Any, ...], tensors: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments with what their names stand for."""
    return tuple([
        tensors[a] if type(a) is str else resolved(a, tensors) if type(a) is tuple else a for a in arguments
    ])  # fmt: skip


class Making(list[Memory]):
    """The memory of a plan while it is made. Methods return names of tensors."""

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype, filled: str | float | None = None) -> str:
        self.append(Memory(name, tuple(shape), dtype, filled))
        return name

    def like(self, name: str, t: Layout | None, filled: str | float | None = None) -> str | None:
        """Memory with the shape and dtype of ``t``; None if there is no ``t``."""
        return None if t is None else self.new(name, t.shape, t.dtype, filled)

    def without_gaps(self, name: str, t: Layout) -> str:
        """A contiguous copy of the tensor ``name``."""
        return self.new(f"{name} without gaps", t.shape, t.dtype, filled=name)

    def whole(self, name: str, t: Layout | None) -> str | None:
        """The tensor ``name``, or a contiguous copy."""
        return None if t is None else name if t.whole else self.without_gaps(name, t)

    def rows(self, name: str, t: Layout, axes: int) -> tuple[str, tuple[int, ...]]:
        """The tensor ``name`` with all axes but the last ``axes`` as one axis of rows, and its strides then. It is a
        copy if strides do not allow this."""
        row = row_stride(t.shape[:-axes], t.strides[:-axes])
        if row is None:
            return self.without_gaps(name, t), contiguous(t.shape)[-axes - 1 :]
        return name, (row, *t.strides[-axes:])


def has_unit_stride(t: Layout) -> bool:
    """Whether the numbers of its last axis adjoin."""
    return t.strides[-1] == 1 or t.shape[-1] == 1


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these axes as one axis, or None if they have none."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(outer != size * stride for (_, outer), (size, stride) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else (strides[-1] if strides else 1)


def laid_out(shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """The layout of a contiguous tensor."""
    return Layout(tuple(shape), contiguous(shape), dtype)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple([prod(shape[axis + 1 :]) for axis in range(len(shape))])
