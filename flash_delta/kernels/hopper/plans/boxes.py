"""Descriptors, which tell the copy engine where tensors are and which tiles it moves."""

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.device import layouts
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.hopper.plans.unplanned import with_contiguous_vectors
from flash_delta.kernels.runtime.descriptors import Descriptor
from flash_delta.kernels.runtime.workspace import Trace
from flash_delta.problem import Inputs, Problem


def token_stride(t: Tensor) -> int:
    """The number of tokens from one batch row to the next."""
    return t.stride(0) // t.stride(1)


def strides(*tokens: Tensor) -> tuple[int | tuple[int, ...], ...]:
    """The `token_stride` of each tensor; then the strides between heads, of all tensors in one tuple."""
    return (*map(token_stride, tokens), tuple(t.stride(2) for t in tokens))


def described(t: Tensor) -> Tensor:
    """``t`` if there is a descriptor for it (`ragged`), otherwise a contiguous copy."""
    return t if describable(t) and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def plain_state(t: Tensor | None) -> Tensor | None:
    """The states in float32 and without gaps."""
    return None if t is None else t.float().contiguous()


def as_taken(x: Inputs, *more: str) -> Inputs:
    """``x`` if kernels can take it, otherwise with copies of some tensors. ``more``: tensors that also need
    descriptors, besides q, k and v."""
    copies = {name: described(getattr(x, name)) for name in ("q", "k", "v", *more)}
    copies["initial_state"] = plain_state(x.initial_state)
    copies = {name: t for name, t in copies.items() if t is not getattr(x, name)}
    return with_contiguous_vectors(x._replace(**copies) if copies else x)


def describable(t: Tensor) -> bool:
    """Whether the strides allow a descriptor (`ragged`)."""
    row, token, head, channel = t.stride()
    return channel == 1 and token > 0 and token % 8 == 0 and head % 8 == 0 and row % token == 0


def ragged(t: Tensor, width: int, height: int = C) -> Descriptor:
    """Describes the tokens of all heads so that the copy engine clips at the end of any sequence. Loads after the end
    give zeros, and stores there do nothing.

    The copy engine clips at the end of axis 2, which has 2^30 elements. In a sequence that ends before row e, row e - i
    has the coordinates ``[2^30, e, 2^30 - i]``. This is the right address because the strides of the first and the
    third axis add up to 2^34 numbers of 2 bytes, and 2^30 times that is 0 modulo 2^64 (the trick of
    ``triton.tools.ragged_tma``).
    """
    box = layouts.FLOAT_BOX if t.dtype == torch.float32 else layouts.BOX
    _, token, head, _ = t.stride()
    shape = [0x7FFF0000, 0x7FFF0000, layouts.RAGGED.value, (t.shape[2] - 1) * head + t.shape[3]]
    return Descriptor(t, shape, [2**34 - token, token, token, 1], [1, 1, height, width], box.value)


def lines(t: Tensor) -> Descriptor:
    """Describes a matrix line by line. A line of rates has four vectors."""
    return Descriptor(t, t.shape, t.stride(), [1, t.shape[1]], layouts.LINES.value)


def squares(t: Tensor) -> Descriptor:
    """Describes the [C, C] matrices of chunks, or Phi, in tiles of [C, C]."""
    return blocks(t, C)


def inverses(t: Tensor) -> Descriptor:
    """Describes the A of chunks, in tiles of [C, C / 2] (device/inverse_tiles.py)."""
    return Descriptor(t, [t.numel() * 2 // C, C // 2], [C // 2, 1], [C, C // 2], layouts.HALF.value)


def saved(trace: Trace | None) -> tuple[Descriptor | None, ...]:
    """Describes what is saved for the backward pass."""
    return (None, None) if trace is None else (blocks(trace.states, C), blocks(trace.U, C))


def blocks(t: Tensor, columns: int, height: int = C) -> Descriptor:
    width = t.shape[-1]
    return Descriptor(t, [t.numel() // width, width], [width, 1], [height, columns], layouts.TILE.value)


def pool(p: Problem, t: Tensor) -> Descriptor:
    """Describes a pool of states by slot, row and column. There may be gaps between slots."""
    rows, width = (64, 32) if p.state_v_first else (32, 64)
    layout = layouts.ROW_STATE
    if t.dtype != torch.float32:
        layout = layouts.ROW_HALF if p.state_v_first else layouts.ROW_TILE
    slots, HV, *head = t.shape
    slot = t.stride(0) if slots > 1 else t.numel()
    return Descriptor(t, [slots, HV * head[0], head[1]], [slot, head[1], 1], [1, rows, width], layout.value)


def states(p: Problem, t: Tensor) -> Descriptor:
    """Describes states by row and column."""
    box = [64, 32] if p.state_v_first else [32, 64]
    return Descriptor(t, [p.N * p.HV * p.K, p.V], [p.V, 1], box, layouts.STATE.value)


def rows(t: Tensor) -> Descriptor:
    """Describes transposed states by row and column."""
    width = t.shape[-1]
    return Descriptor(t, [t.numel() // width, width], [width, 1], [64, 32], layouts.STATE.value)


def handed_by(tape: Tape | None, handed: Descriptor | None = None) -> tuple[Descriptor | None, Tensor | None]:
    """The states that programs hand over, and the tape's table. ``handed``: the first result, if it is known."""
    return (handed, None) if tape is None else (handed or rows(tape.handed), tape.table)
