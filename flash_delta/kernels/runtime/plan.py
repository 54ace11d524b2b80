"""A call's launches and memory as values. A plan is made from a problem and from layouts, and never from tensors.

A layout has the name of its tensor: one that the caller gives, or one that the plan makes. So a step reads the same
tensor whether two tensors of a call are one object or not, and wherever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.problem import Inputs, Problem

EVERY: Any = "every"
"""A choice that stands for all choices. A plan with it has what calls of any size may launch. It is compiled and never
run."""


@dataclass(slots=True)
class Layout:
    """Everything about a tensor except its numbers and its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0  # of the address, from a multiple of 16 bytes
    name: str = ""
    start: int | None = None  # None: it is the tensor ``name``; or where it begins in that tensor, in bytes

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def numel(self) -> int:
        return prod(self.shape)

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


@dataclass(slots=True)
class Memory(Layout):
    """A contiguous tensor that is made for a call. Only the call's steps use it, unless it is a result."""

    filled: Layout | float | None = None  # before the first step: with a given tensor's numbers, or with this number

    @property
    def nbytes(self) -> int:
        """The bytes that it takes. What is filled is an allocation of its own, other memory is side by side in one."""
        exact = prod(self.shape) * self.dtype.itemsize
        return exact if self.filled is not None else -(-exact // 256) * 256


class Descriptor(NamedTuple):
    """An argument for the copy engine: a tensor, and the tiles that it moves (hopper/plans/boxes.py)."""

    tensor: Layout
    shape: tuple[int, ...]  # as the copy engine counts
    strides: tuple[int, ...]
    box: tuple[int, ...]  # the shape of a tile
    layout: Any  # of a tile in shared memory


class Step(NamedTuple):
    """One launch."""

    kernel: Any
    grid: tuple[int, int, int]
    tile: Tile
    arguments: tuple[Any, ...]  # the parameters before the constants: layouts, descriptors, numbers, None, tuples
    constants: dict[str, Any]
    follows: bool = False  # the kernel before it is of the same call and may still run (chunk.follow)
    contracts: bool = True  # the compiler may fuse a product and a sum, with one rounding


class Plan(NamedTuple):
    """What a call makes, and what it launches, in order."""

    steps: tuple[Step, ...]
    memory: tuple[Memory, ...]
    results: tuple[Layout | None, ...]  # what `run` returns: memory or given tensors; None stays None

    def __str__(self) -> str:
        steps = [step for step in self.steps if 0 not in step.grid]
        return "\n".join([f"{s.kernel.__name__}, grid {' x '.join(map(str, s.grid))}, {s.tile}" for s in steps])

    @property
    def workspace_bytes(self) -> int:
        """The bytes that are made besides results."""
        returned = {t.name for t in self.results if t is not None}
        return sum(m.nbytes for m in self.memory if m.name not in returned)


def layout_of(t: Tensor | Layout | None, name: str = "") -> Layout | None:
    """The layout of a tensor, or a layout under another name."""
    if t is None:
        return None
    offset = t.offset if isinstance(t, Layout) else t.data_ptr() % 16
    return Layout(t.shape, t.stride(), t.dtype, offset, name)


def layouts_of(group: Any) -> Any:
    """The layouts of a named tuple of tensors. Its fields are their names."""
    return group._make([layout_of(t, name) for t, name in zip(group, group._fields, strict=True)])


class Making(list[Memory]):
    """The memory of a plan while it is made."""

    def new(self, name: str, shape: Sequence[int], dtype: torch.dtype, filled: Layout | float | None = None) -> Memory:
        self.append(Memory(tuple(shape), contiguous(shape), dtype, name=name, filled=filled))
        return self[-1]

    def like(self, name: str, t: Layout | None, filled: Layout | float | None = None) -> Memory | None:
        """Memory with the shape and dtype of ``t``; None if there is no ``t``."""
        return None if t is None else self.new(name, t.shape, t.dtype, filled)

    def without_gaps(self, t: Layout) -> Memory:
        """A contiguous copy."""
        return self.new(f"{t.name} without gaps", t.shape, t.dtype, filled=t)

    def whole(self, t: Layout | None) -> Layout | None:
        """The tensor, or a contiguous copy."""
        return t if t is None or t.whole else self.without_gaps(t)

    def rows(self, t: Layout, axes: int) -> tuple[Layout, tuple[int, ...]]:
        """The tensor with all axes but the last ``axes`` as one axis of rows, and its strides then. It is a copy if
        strides do not allow this."""
        row = row_stride(t.shape[:-axes], t.strides[:-axes])
        if row is None:
            return self.without_gaps(t), contiguous(t.shape)[-axes - 1 :]
        return t, (row, *t.strides[-axes:])

    def plain_states(self, t: Layout | None) -> Layout | None:
        """The states in float32 and without gaps."""
        plain = t is None or (t.dtype == torch.float32 and t.whole)
        return t if plain else self.new(f"{t.name} without gaps", t.shape, torch.float32, filled=t)


class Draft(NamedTuple):
    """A plan of the rule while it is made. Launchers append steps to it."""

    p: Problem
    x: Inputs  # of layouts
    chip: Chip
    every: bool  # whether to plan what calls of any size may launch
    constants: dict[str, Any]  # those that do not depend on a tile (arguments.py)
    made: Making
    steps: list[Step]

    @property
    def keys(self) -> Layout:
        """The keys that erase."""
        return self.x.k if self.x.p is None else self.x.p

    def plan(self, *results: Layout | None) -> Plan:
        return Plan(tuple(self.steps), tuple(self.made), results)


def part_of(buffer: Layout, start: int, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """A contiguous tensor in a buffer, from byte ``start`` on."""
    return Layout(tuple(shape), contiguous(shape), dtype, buffer.offset, buffer.name, start)


def has_unit_stride(t: Layout) -> bool:
    """Whether the numbers of its last axis adjoin."""
    return t.strides[-1] == 1 or t.shape[-1] == 1


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these axes as one axis, or None if they have none."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(outer != size * stride for (_, outer), (size, stride) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else (strides[-1] if strides else 1)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
