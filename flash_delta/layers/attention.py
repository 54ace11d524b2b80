"""Softmax attention with grouped key heads and rotary positions, for hybrid models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_delta.layers.documents import read_documents
from flash_delta.layers.packing import check_inputs, check_positions, check_width
from flash_delta.layers.state import AttentionState
from flash_delta.ops._check.options import as_float, as_size
from flash_delta.ops._operators.define import define
from flash_delta.parallel import ContextParallel
from flash_delta.parallel.attention import attend_packed


class Attention(nn.Module):
    """Causal softmax attention, o_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(d)) v_s, queries in groups per key head.

    q and k are rotated by their token's position (rotary embedding, arXiv:2104.09864, halves paired as in Llama);
    padding takes no position. Grouped heads: arXiv:2305.13245.

    Args:
        hidden_size: width D of the input and output.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads; None means num_heads.
        head_dim: width per head, even; None means hidden_size / num_heads.
        rope_theta: base of the rotary frequencies. Default 10000.
        layer_idx: the place of the layer in its model. The layer does not use it.

    Raises:
        ValueError: if the heads do not divide as above or head_dim is odd.

    Example:
        >>> import torch
        >>> from flash_delta.layers import Attention
        >>> layer = Attention(hidden_size=64, num_heads=4, num_kv_heads=2)
        >>> layer(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        layer = type(self).__name__
        hidden_size, num_heads = as_size(layer, "hidden_size", hidden_size), as_size(layer, "num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else as_size(layer, "num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
        if head_dim is None and hidden_size % num_heads != 0:
            raise ValueError(f"num_heads: expected a divisor of hidden_size = {hidden_size}, got {num_heads}")
        head_dim = hidden_size // num_heads if head_dim is None else as_size(layer, "head_dim", head_dim)
        if head_dim % 2 != 0:
            raise ValueError(f"head_dim: expected an even width to rotate in pairs, got {head_dim}")
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.rope_theta = as_float(layer, "rope_theta", rope_theta, "a number of at least 1", lowest=1.0)
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        state: AttentionState | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence; the arguments are those of `GatedDeltaNet.forward`, with three differences.

        Documents (``position_ids``) need a [T, T] mask, so memory grows with the square of the row's length. The same
        holds for ``cu_seqlens``, unless PyTorch has a kernel for packed sequences (on a GPU in 16 bits, from torch 2.11
        on). If a row is split over ranks that divide the heads, each rank computes all tokens of its own heads.
        Otherwise it has the keys and values of all ranks, and its own rows of a mask. Packed rows cannot be combined
        with a state, because caches of different lengths do not form one row.

        position_ids [B, T] or [1, T] are also the positions by which q and k are rotated. If they are None, positions
        count the tokens of each sequence from 0, without padding, and after a state they continue.

        Raises:
            ValueError: as `GatedDeltaNet.forward`, if state and cu_seqlens (or cp_context) are both given, or if
                position_ids have another shape.
        """
        if state is not None and (cu_seqlens is not None or cp_context is not None):
            raise ValueError(
                "state: expected None together with cu_seqlens or cp_context (attention caches unpacked batches only), "
                f"got {type(state).__name__}"
            )
        past = AttentionState() if state is None else state
        key_mask = None
        if cp_context is not None:
            cp_context.check(hidden_states, attention_mask, cu_seqlens)
            bounds = cp_context.row_bounds(hidden_states.device)
            row = torch.arange(cp_context.split.total, device=hidden_states.device)
            layout = _row_layout(cp_context.shard(row, dim=0), bounds)
        elif cu_seqlens is not None:
            check_inputs(hidden_states, attention_mask, cu_seqlens)
            row = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            layout = _row_layout(row, cu_seqlens.long())
        else:
            key_mask = past.extended_mask(check_inputs(hidden_states, attention_mask, None), hidden_states.shape[1])
            layout = _batch_layout(hidden_states, past.length, key_mask)
            layout = layout.within(read_documents(hidden_states, position_ids, attention_mask, cu_seqlens, state))
        if position_ids is not None:
            check_positions(hidden_states, position_ids)
        positions = layout.positions if position_ids is None else position_ids
        check_width(hidden_states, self.hidden_size)

        x = layout.zero_padding(hidden_states)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        wide = torch.promote_types(q.dtype, torch.float32)  # 16 bits cannot hold a long position
        rotation = _rotation(positions, self.head_dim, self.rope_theta, wide)  # cos, sin [B, 1, T, head_dim / 2]
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        if past.keys is not None:
            k, v = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
        if state is not None:
            state.keys, state.values, state.mask = k, v, key_mask
        if cp_context is not None:
            o = cp_context.attend(q, k, v)
        elif cu_seqlens is not None:
            o = attend_packed(q, k, v, None, torch.cat([cu_seqlens, cu_seqlens.new_full((1,), q.shape[2])]))
        else:
            is_causal = layout.allowed is None
            o = F.scaled_dot_product_attention(q, k, v, layout.allowed, is_causal=is_causal, enable_gqa=True)
        return layout.zero_padding(self.o_proj(o.transpose(1, 2).flatten(2)))


class _Layout(NamedTuple):
    """Which tokens attend to which: positions [B or 1, T]; allowed [B or 1, 1, T, S] bool, None for a causal mask;
    valid [B, T] bool, None if every token counts."""

    positions: Tensor
    allowed: Tensor | None
    valid: Tensor | None

    def zero_padding(self, x: Tensor) -> Tensor:
        return x if self.valid is None else x.where(self.valid[..., None], 0)

    def within(self, seq_idx: Tensor | None) -> _Layout:
        """Returns a layout in which each token also attends only within its own document; seq_idx [B or 1, T]."""
        if seq_idx is None:
            return self
        same = (seq_idx[:, :, None] == seq_idx[:, None, :])[:, None]  # [B or 1, 1, T, T]
        return self._replace(allowed=same.tril() if self.allowed is None else same & self.allowed)


def _batch_layout(hidden_states: Tensor, past: int, key_mask: Tensor | None) -> _Layout:
    """T new tokens after `past` old ones; key_mask [B, past + T]."""
    T, device = hidden_states.shape[1], hidden_states.device
    slots = torch.arange(past + T, device=device)
    if key_mask is None and past == 0:
        return _Layout(slots[None], None, None)
    causal = slots <= slots[past:, None]  # [T, S]
    if key_mask is None:
        return _Layout(slots[None, past:], causal[None, None], None)
    positions = (key_mask.cumsum(1) - 1).clamp(min=0)[:, past:]
    # A padding token attends to itself. A row without any key would be NaN, also in the backward pass.
    allowed = causal & key_mask[:, None, :] | (slots == slots[past:, None])
    return _Layout(positions, allowed[:, None], key_mask[:, past:])


def _row_layout(tokens: Tensor, bounds: Tensor) -> _Layout:
    """The layout of tokens [T] that are given by their places in a row of sequences. Tokens after the last bound count
    as one more sequence, which is padding."""
    positions = tokens - bounds[torch.searchsorted(bounds[1:], tokens, right=True)]
    return _Layout(positions[None], None, (tokens < bounds[-1])[None])


def _find_rotation(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> list[Tensor]:
    frequency = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width)
    angle = positions[:, None, :, None].to(dtype) * frequency
    return [angle.cos(), angle.sin()]


def _empty_rotation(positions: Tensor, width: int, _: float, dtype: torch.dtype) -> list[Tensor]:
    B, T = positions.shape
    return [positions.new_empty(B, 1, T, width // 2, dtype=dtype) for _ in range(2)]


# An operator, because a compiler would compute the angles again for each number of q and k.
_rotation = define("rotation", _find_rotation, _empty_rotation)


def _rotate(x: Tensor, rotation: Sequence[Tensor]) -> Tensor:
    """Rotates x [B, heads, T, head_dim]. Channels i and i + head_dim / 2 are a pair."""
    cos, sin = rotation
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
