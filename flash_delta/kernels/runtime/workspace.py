"""The tensors that kernels of a call pass to each other, and the one allocation for all of them.

The size of a tensor is the number of slots (chunk.py) times the size for one chunk, a multiple of 256 bytes. K' and V'
are the pitches of K and V, in whole units of 8 numbers. V'' are whole tiles of rows (chunk.py). Columns beyond K and V
are 0. Rows beyond V hold arbitrary numbers. With usual widths these are K and V. A and L are float16 if inputs have 16
bits (triton/forward/products.py), and float32 otherwise.
"""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from flash_delta.kernels.device.chunk import C, count_slots, pitch, whole_rows
from flash_delta.kernels.runtime.plan import Layout, Making, Memory, contiguous
from flash_delta.problem import Problem


class Solved(NamedTuple):
    """The tensors that `solve` writes."""

    A: Any  # [slots, HV, C, C]; None if nothing is erased. With a decay per channel without its diagonal, which is 1
    vectors: Any  # [slots, HV, 4, C] float32: G high, G low, b, log decay
    norms: Any  # [slots, H, 3, C] float32: of q, k, p; None without a norm


class ForBackward(NamedTuple):
    """The tensors that `hopper`'s forward pass saves for its backward pass."""

    A: Any  # [slots, HV, 3, C, C / 2], without diag(b) (hopper/device/inverse_tiles.py)
    norms: Any  # [slots, H, 2, C] float32: of q, k; None without a norm


class Channels(NamedTuple):
    """The tensors that `channel` writes. With a decay per channel, others read them instead of q and k; else None."""

    Qg: Any  # [slots, HV, C, K']
    Kg: Any  # [slots, HV, C, K']
    Kd: Any  # [slots, HV, C, K']
    P: Any  # [slots, HV, C, C]
    L: Any  # [slots, HV, C, C]
    gamma: Any  # [slots, HV, K] float32
    rates: Any  # [slots, HV, 4, C] float32


class Prepared(NamedTuple):
    """The tensors that `prepare` of `hopper` writes with a decay per channel. A lacks diag(b) and its own diagonal."""

    Qg: Any  # [slots, HV, C, K]
    Kg: Any  # [slots, HV, C, K]
    Kd: Any  # [slots, HV, C, K]
    P: Any  # [slots, HV, C, C]
    A: Any  # [slots, HV, C, C]
    gamma: Any  # [slots, HV, K] float32
    rates: Any  # [slots, HV, 4, C] float32: norms of q, with the scale, and of k, and b


class Factors(NamedTuple):
    """The tensors that `factor` writes. None with a decay per channel."""

    X: Any  # [slots, HV, C, K']
    Y: Any  # [slots, HV, C, C]
    rates: Any  # [slots, HV, 4, C] float32


class Trace(NamedTuple):
    """What the backward pass of `hopper` needs of every chunk. Either pass writes it."""

    states: Any  # [slots, HV, V'', K']
    U: Any  # [slots, HV, C, V']


class Residual(NamedTuple):
    """The tensors that `scan` writes for the backward pass."""

    states: Any  # [slots, HV, V'', K']
    R: Any  # [slots, HV, C, V']
    U: Any  # [slots, HV, C, V']


class StateGradients(NamedTuple):
    """The tensors that `scan_backward` writes."""

    dstates: Any  # [slots, HV, V'', K']; with a decay per channel divided by `state_unit`
    dU: Any  # [slots, HV, C, V']


class Scores(NamedTuple):
    """The tensors that `pairs` writes for the other kernels of gradients."""

    queries: Any  # [slots, HV, C, C]: the gradient of q . k in a chunk
    keys: Any  # [slots, HV, C, C]: the gradient of p . k with opposite sign
    parts: Any  # [slots, HV, 4, C] float32: parts of the gates' gradients, a row per kernel; None without a scalar gate


class HeadGradients(NamedTuple):
    """With a decay per channel, what kernels of gradients pass on to `key_head_gradients` and to each other; else None.

    In bfloat16 `pairs` writes products with states: the first parts of dq and dk, and written and through.
    `channel_gradients` completes dq and dk, and writes fallen. In other dtypes there is only `halved_gradients`, which
    writes dq and dk.
    """

    dq: Any  # [slots, HV, C, K]
    dk: Any  # [slots, HV, C, K]
    written: Any  # [slots, HV, C, K]: U dS1^T; this and the next two only in bfloat16
    through: Any  # [slots, HV, K] float32: <S0, dS1> of each channel
    fallen: Any  # [slots, HV, K] float32: the strongest decay within a block of 16 tokens, in bits, at most 0


class DeepChunks(NamedTuple):
    """The tensors that `chunk_back` of `hopper` writes for its second launch."""

    chunks: Any  # [slots, HV] int32: whether a channel of the chunk may decay by very much


class Part(NamedTuple):
    """One tensor in the memory of a slot: where it begins, its shape and dtype."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]  # of the tensors of all slots
    name: str  # in a plan


class Placement(NamedTuple):
    bytes: int  # per slot
    groups: tuple[Any, ...]  # named tuples of Part or None


def make_groups(made: Making, p: Problem, *groups: type) -> list[Any]:
    """Makes a tensor of the plan for each tensor of these groups."""
    slots, found = count_slots(p), []
    for g in _layout_of(p, groups).groups:
        memory = [part and Memory((slots, *part.shape), part.strides, part.dtype, name=part.name) for part in g]
        made += filter(None, memory)
        found.append(g._make(memory))
    return found


def groups_in(buffer: Layout, p: Problem, *groups: type) -> list[Any]:
    """Places these groups in one buffer of `count_bytes`."""
    slots, to = count_slots(p), (buffer.offset, buffer.name)
    return [
        g._make([
            part and Layout((slots, *part.shape), part.strides, part.dtype, *to, slots * part.start) for part in g
        ]) for g in _layout_of(p, groups).groups
    ]  # fmt: skip


def count_bytes(p: Problem, *groups: type) -> int:
    """The number of bytes for these groups."""
    return count_slots(p) * _layout_of(p, groups).bytes


def _layout_of(p: Problem, groups: tuple[type, ...]) -> Placement:
    return _layout(groups, p.dtype, p.H, p.HV, p.K, p.V, p.gate.kind, p.erase, p.l2norm)


@lru_cache
def _layout(
    groups: tuple[type, ...], dtype: torch.dtype, H: int, HV: int, K: int, V: int, gate: str, erase: str | None,
    l2norm: bool,
) -> Placement:  # fmt: skip
    square, vectors = ((HV, C, C), dtype), ((HV, 4, C), torch.float32)
    state, rows = ((HV, whole_rows(V), pitch(K)), dtype), ((HV, C, pitch(V)), dtype)
    keys, key_heads = ((HV, C, pitch(K)), dtype), ((HV, C, K), dtype)
    fine = (HV, C, C), torch.float32 if dtype == torch.float32 else torch.float16
    per_channel = ((HV, K), torch.float32)
    norms, norms_of_two = (((H, of, C), torch.float32) if l2norm else None for of in (3, 2))
    channels = (keys, keys, keys, square, fine, per_channel, vectors)
    products = (key_heads, per_channel, per_channel) if dtype == torch.bfloat16 else (None,) * 3
    tensors = {
        Solved: (None if erase is None else fine, vectors, norms),
        ForBackward: (((HV, 3, C, C // 2), dtype), norms_of_two),
        Channels: channels if gate == "channel" else (None,) * 7,
        Prepared: (keys, keys, keys, square, fine, per_channel, vectors),
        Factors: (None,) * 3 if gate == "channel" else (keys, square, vectors),
        Trace: (state, rows),
        Residual: (state, rows, rows),
        StateGradients: (state, rows),
        Scores: (square, square, vectors if gate == "scalar" else None),
        DeepChunks: (((HV,), torch.int32),),
        HeadGradients: (key_heads, key_heads, *products) if gate == "channel" else (None,) * 5,
    }
    start, placed = 0, []
    for group in groups:
        parts = []
        for field, tensor in zip(group._fields, tensors[group], strict=True):
            name, strides = f"{group.__name__}.{field}", contiguous((1, *tensor[0])) if tensor else ()
            parts.append(None if tensor is None else Part(start, *tensor, strides, name))
            if tensor is not None:
                start += -(-prod(tensor[0]) * tensor[1].itemsize // 256) * 256
        placed.append(group._make(parts))
    return Placement(start, tuple(placed))
