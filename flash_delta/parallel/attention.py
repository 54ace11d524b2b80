"""Softmax attention within the sequences of a packed row, also of a row that is split over ranks.

If the ranks divide the heads, they exchange tokens for heads (all to all, arXiv:2309.14509): each rank gets all tokens
of its own heads. So the ranks' work is equal for any split of the tokens, and sequences are one call of a kernel each,
or all of them are one. Otherwise each rank gathers keys and values, and its mask has a row for each of its queries.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flash_delta.parallel.part import Part
from flash_delta.parallel.tokens import AllTokens

HAS_ROWS = torch.__version__ >= "2.11"  # whether PyTorch has a kernel for rows of sequences, with a window


def attend_split(context: Part, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """This rank's tokens ``[1, heads, T, D]`` -> its outputs. ``options`` are those of PyTorch's attention, `dropout_p`
    and `scale`. Tokens after the last sequence form one more sequence."""
    kind = q.device.type
    if q.dtype != torch.float64 and torch.is_autocast_enabled(kind):  # as it does for PyTorch's attention
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"k, v: expected the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}")
    bounds, on_device = context.padded_bounds(q.device)
    if q.shape[1] % context.size == 0 and k.shape[1] % context.size == 0:
        q, k, v = ToHeads.apply(context, q, k, v)
        return ToTokens.apply(context, attend_packed(q, k, v, bounds, on_device, **options))
    k, v = (AllTokens.apply(context, 2, x) for x in (k, v))
    tokens = torch.arange(context.split.total, device=q.device)
    mask = _may_attend(context.shard(tokens, dim=0), tokens, on_device)
    return F.scaled_dot_product_attention(q, k, v, mask, **options, enable_gqa=True)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...] | None, on_device: Tensor, **options: Any
) -> Tensor:
    """Whole rows ``[1, heads, T, D]`` of sequences that end at the row's end -> their outputs.

    ``bounds`` are on the host, or None. ``on_device`` are the same. Without a kernel for rows of sequences, each
    sequence is a call of its own. Where the host has no bounds there is one call with a mask.
    """
    lengths = None if bounds is None else [stop - start for start, stop in pairwise(bounds) if stop > start]
    if lengths is not None and len(lengths) < 2:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options, enable_gqa=True)
    if takes_rows(q, v, **options):
        return _rows(q, k, v, on_device, options.get("scale"))
    if lengths is None:
        tokens = torch.arange(q.shape[2], device=q.device)
        mask = _may_attend(tokens, tokens, on_device)
        return F.scaled_dot_product_attention(q, k, v, mask, **options, enable_gqa=True)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*part, is_causal=True, **options, enable_gqa=True) for part in parts], 2
    )


def takes_rows(q: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None) -> bool:
    """Whether PyTorch has a kernel for rows of sequences that takes this. It is FlashAttention, called directly."""
    half, D = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    if not (HAS_ROWS and q.is_cuda and half and dropout_p == 0):
        return False
    return v.shape[-1] == D and D % 8 == 0 and D <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _rows(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # it takes long, and imports Triton

    groups, longest, bounds = q.shape[1] // k.shape[1], q.shape[2], bounds.int()
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    tokens = (x[0].transpose(0, 1) for x in (q, k, v))
    o = varlen_attn(*tokens, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))  # 0: causal
    return o.transpose(0, 1)[None]


def _may_attend(queries: Tensor, keys: Tensor, bounds: Tensor) -> Tensor:
    """The mask ``[1, 1, T, S]`` for queries [T] and keys [S], which are given by their places in the row."""
    of_query, of_key = (torch.searchsorted(bounds[1:], x, right=True) for x in (queries, keys))
    return ((of_key == of_query[:, None]) & (keys <= queries[:, None]))[None, None]


class ToHeads(torch.autograd.Function):
    """Exchanges this rank's tokens of all heads for all tokens, in order, of this rank's heads."""

    @staticmethod
    def forward(ctx, context: Part, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return _to_heads(context, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dx: Tensor):
        return None, *_to_tokens(ctx.context, dx)


class ToTokens(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx, context: Part, y: Tensor) -> Tensor:
        ctx.context = context
        return _to_tokens(context, (y,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return None, *_to_heads(ctx.context, (dy,))


def _to_heads(context: Part, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each of ``xs`` [1, heads, T, D] -> [1, heads of this rank, all tokens, D]. It is one exchange for all of them."""
    split, P = context.split, context.size
    sent = torch.cat([x[0].unflatten(0, (P, -1)).transpose(1, 2).flatten(2) for x in xs], 2)  # [P, T, heads * D]
    counts = [split.tokens(rank) for rank in range(P)]
    found = context.exchange(sent.flatten(0, 1), [context.tokens] * P, counts).split(counts)
    row = torch.cat([found[rank][start:stop] for rank, start, stop in split.in_order()])
    parts = row.split([x.shape[1] // P * x.shape[3] for x in xs], 1)
    return tuple(y.unflatten(1, (-1, x.shape[3])).transpose(0, 1)[None] for x, y in zip(xs, parts, strict=True))


def _to_tokens(context: Part, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each of ``xs`` [1, heads of this rank, all tokens, D] -> [1, heads, T, D]."""
    split, P = context.split, context.size
    row = torch.cat([x[0].transpose(0, 1).flatten(1) for x in xs], 1)  # [tokens, heads * D]
    sent = torch.cat([row[start:stop] for fragments in split.fragments for start, stop in fragments])
    counts = [split.tokens(rank) for rank in range(P)]
    found = context.exchange(sent, counts, [context.tokens] * P).unflatten(0, (P, context.tokens))
    parts = found.split([x.shape[1] * x.shape[3] for x in xs], 2)  # [P, T, heads * D]
    return tuple(
        y.unflatten(2, (-1, x.shape[3])).transpose(1, 2).flatten(0, 1)[None] for x, y in zip(xs, parts, strict=True)
    )
