"""Documents side by side in rows [B, T], told by positions that restart at 0, and kept apart on the device.

``seq_idx`` [B, T] numbers the documents of a row: a token may see those of its own number. It takes the place of bounds
where nobody counted the documents: its shape does not depend on how many there are, and no value is read. Bounds would
have to allow for B * T sequences, and kernels start programs for every sequence that there may be.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.layers.packing import check_positions
from flash_delta.ops._transforms import is_traced


def number_documents(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Positions [B, T] -> seq_idx [B, T], int64, from 0 on.

    A document starts at a position 0 that follows another token of its row. Padding is no token: neither the zeros in
    front of a prompt, nor the one where it begins, are a start.

    Args:
        position_ids: [B, T], or [1, T] for all rows.
        attention_mask: [B, past + T] of which the last T columns are these tokens'; nonzero marks a token. None: all.
    """
    T, device = position_ids.shape[1], position_ids.device
    if attention_mask is None:
        follows = torch.arange(T, device=device) > 0
        return ((position_ids == 0) & follows).cumsum(1)
    counts = attention_mask.bool()
    follows = counts & (counts.cumsum(1) > 1)
    return ((position_ids == 0) & follows[:, follows.shape[1] - T :]).cumsum(1)


def forget_at_starts(g: Tensor, seq_idx: Tensor) -> Tensor:
    """Log decays [B, T, HV] or [B, T, HV, K], and -inf where a document starts: the state decays to exactly 0 there.

    That separates wherever the erase reads the decayed state. Comba's reads the state before: there the erase key of a
    document's first token has to be 0, too.
    """
    first = starts(seq_idx)
    return g.masked_fill(first.view(*first.shape, *[1] * (g.dim() - 2)), -torch.inf)


def starts(seq_idx: Tensor) -> Tensor:
    """[B, T] bool: the tokens that start a document after another one."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def refuse_restarts(position_ids: Tensor, attention_mask: Tensor | None, beside: str) -> None:
    """Refuse documents where rows have to be one each, if the host sees the values: those of a GPU it would wait for,
    and a tracer has none.

    Raises:
        ValueError: if positions on a CPU restart.
    """
    if position_ids.device.type != "cpu" or is_traced(position_ids):
        return
    if bool((number_documents(position_ids, attention_mask) > 0).any()):
        raise ValueError(
            f"position_ids: expected one document per row beside {beside}, got positions that restart at 0: call "
            f"without {beside} (use_cache=False), or give every document a row of its own"
        )


def read_documents(
    hidden_states: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: object | None,
) -> Tensor | None:
    """Of a layer's arguments the documents' numbers, [B or 1, T]; None where nothing has to be kept apart by them.

    That is so without positions, beside cu_seqlens, for one token, and with a state: a row is one document then.

    Raises:
        ValueError: if position_ids have another shape than [B, T] or [1, T], or restart beside a state.
    """
    if position_ids is None:
        return None
    check_positions(hidden_states, position_ids)
    if cu_seqlens is not None or position_ids.shape[1] == 1:
        return None
    if state is not None:
        refuse_restarts(position_ids, attention_mask, beside="a state or cache")
        return None
    return number_documents(position_ids, attention_mask)
