"""Descriptors, which tell the copy engine where tensors are and which tiles it moves."""

from math import prod
from typing import Any

import torch

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.device import layouts
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.runtime.plan import Descriptor, Layout, Making
from flash_delta.kernels.runtime.workspace import Trace
from flash_delta.problem import Inputs, Problem


def token_stride(t: Layout) -> int:
    """The number of tokens from one batch row to the next."""
    return t.stride(0) // t.stride(1)


def strides(*tokens: Layout | None) -> tuple[Any, ...]:
    """The `token_stride` of each tensor, or None; then the strides between heads, of all tensors in one tuple."""
    return (*(t and token_stride(t) for t in tokens), tuple(t.stride(2) for t in tokens if t))


def row_strides(p: Problem, *tokens: Layout) -> tuple[Any, ...]:
    """Their `strides`. Those between batch rows count rows of k, also of tensors with one row per token."""
    *batches, heads = strides(*tokens)
    rows = [p.steps if t.shape[1] < p.T else 1 for t in tokens]
    return *(stride * steps for stride, steps in zip(batches, rows, strict=True)), heads


def describe(made: Making, t: Layout) -> Layout:
    """``t`` if there is a descriptor for it (`ragged`), otherwise a contiguous copy."""
    return t if describable(t) and t.offset == 0 else made.without_gaps(t)


def as_taken(made: Making, x: Inputs, *more: str) -> Inputs:
    """``x`` as kernels can take it, with copies of some tensors. ``more``: tensors that also need descriptors, besides
    q, k and v."""
    return described(made, x, "q", "k", "v", *more)._replace(initial_state=made.plain_states(x.initial_state))


def described(made: Making, x: Inputs, *names: str) -> Inputs:
    """``x`` with descriptors for the tensors ``names`` that it has, with copies of some."""
    given = {name: getattr(x, name) for name in names}
    return x._replace(**{name: describe(made, t) for name, t in given.items() if t is not None})


def describable(t: Layout) -> bool:
    """Whether the strides allow a descriptor (`ragged`)."""
    row, token, head, channel = t.stride()
    return channel == 1 and token > 0 and token % 8 == 0 and head % 8 == 0 and row % token == 0


def ragged(t: Layout | None, width: int, height: int = C, steps: int = 1) -> Descriptor | None:
    """Describes the tokens of all heads so that the copy engine clips at the end of any sequence. Loads after the end
    give zeros, and stores there do nothing. None without a tensor.

    The copy engine clips at the end of axis 2, which has 2^30 elements. In a sequence that ends before row e, row e - i
    has the coordinates ``[2^30, e, 2^30 - i]``. This is the right address because the strides of the first and the
    third axis add up to 2^34 numbers of 2 bytes, and 2^30 times that is 0 modulo 2^64 (the trick of
    ``triton.tools.ragged_tma``).

    With ``steps`` the tensor has a row for so many rows of a tile. A further axis of size 1 stands for the others. So
    loads give zeros there, and stores do nothing. Coordinates count rows of the tensor, ``[2^30, e, 2^30 - i, 0]``.
    """
    if t is None:
        return None
    box = layouts.FLOAT_BOX if t.dtype == torch.float32 else layouts.BOX
    _, token, head, _ = t.stride()
    shape = (0x7FFF0000, 0x7FFF0000, layouts.RAGGED.value, (t.shape[2] - 1) * head + t.shape[3])
    if steps == 1:
        return Descriptor(t, shape, (2**34 - token, token, token, 1), (1, 1, height, width), box.value)
    shape, strides = (*shape[:3], 1, shape[3]), (2**34 - token, token, token, token, 1)
    return Descriptor(t, shape, strides, (1, 1, height // steps, steps, width), layouts.STEP_BOX.value)


def lines(t: Layout, width: int = 4 * C) -> Descriptor:
    """Describes a matrix of float32 line by line. A line of rates has four vectors."""
    return _matrix(t, width, (1, width), layouts.LINES)


def squares(t: Layout) -> Descriptor:
    """Describes the [C, C] matrices of chunks, or Phi, in tiles of [C, C]."""
    return blocks(t, C)


def inverses(t: Layout) -> Descriptor:
    """Describes the A of chunks, in tiles of [C, C / 2] (device/inverse_tiles.py)."""
    return _matrix(t, C // 2, (C, C // 2), layouts.HALF)


def saved(trace: Trace | None) -> tuple[Descriptor | None, ...]:
    """Describes what is saved for the backward pass."""
    return (None, None) if trace is None else (blocks(trace.states, C), blocks(trace.U, C))


def blocks(t: Layout, columns: int, height: int = C) -> Descriptor:
    return _matrix(t, t.shape[-1], (height, columns), layouts.TILE)


def pool(p: Problem, t: Layout) -> Descriptor:
    """Describes a pool of states by slot, row and column. There may be gaps between slots."""
    rows, width = (64, 32) if p.state_v_first else (32, 64)
    layout = layouts.ROW_STATE
    if t.dtype != torch.float32:
        layout = layouts.ROW_HALF if p.state_v_first else layouts.ROW_TILE
    slots, HV, *head = t.shape
    slot = t.stride(0) if slots > 1 else t.numel()
    return Descriptor(t, (slots, HV * head[0], head[1]), (slot, head[1], 1), (1, rows, width), layout.value)


def states(p: Problem, t: Layout) -> Descriptor:
    """Describes states by row and column."""
    return _matrix(t, p.V, (64, 32) if p.state_v_first else (32, 64), layouts.STATE)


def rows(t: Layout) -> Descriptor:
    """Describes transposed states by row and column."""
    return _matrix(t, t.shape[-1], (64, 32), layouts.STATE)


def _matrix(t: Layout, width: int, box: tuple[int, int], layout: Any) -> Descriptor:
    """Describes a contiguous tensor as a matrix with so many columns."""
    return Descriptor(t, (prod(t.shape) // width, width), (width, 1), box, layout.value)


def handed_by(tape: Tape | None, handed: Descriptor | None = None) -> tuple[Descriptor | None, Layout | None]:
    """The states that programs hand over, and the tape's table. ``handed``: the first result, if it is known."""
    return (handed, None) if tape is None else (handed or rows(tape.handed), tape.table)
