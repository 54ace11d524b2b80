"""Rows [B, T] with several documents. Positions that restart at 0 mark them, and the device keeps them apart.

``seq_idx`` [B, T] numbers the documents of a row. A token sees only tokens with its own number. It replaces bounds if
the host does not know how many documents there are: its shape does not depend on their number, and the host reads no
value. Bounds would need room for B * T sequences, and kernels would start programs for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.layers.packing import check_positions
from flash_delta.ops._transforms import is_traced


def number_documents(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Positions [B, T] -> seq_idx [B, T], int64, from 0 on.

    A document starts at a position 0 that follows another token of its row. Padding is no token. So
    neither padding with position 0 starts a document, nor the 0 of a prompt's first token after padding.

    Args:
        position_ids: [B, T], or [1, T] for all rows.
        attention_mask: [B, past + T]. The last T columns are for these tokens. Nonzero marks a token, 0 padding.
            None: no padding.
    """
    T, device = position_ids.shape[1], position_ids.device
    if attention_mask is None:
        follows = torch.arange(T, device=device) > 0
        return ((position_ids == 0) & follows).cumsum(1)
    counts = attention_mask.bool()
    follows = counts & (counts.cumsum(1) > 1)
    return ((position_ids == 0) & follows[:, follows.shape[1] - T :]).cumsum(1)


def forget_at_starts(g: Tensor, seq_idx: Tensor) -> Tensor:
    """Log decays [B, T, HV] or [B, T, HV, K] with -inf where a document starts, so that the state decays to exactly 0.

    This separates documents if the erase step reads the decayed state. Comba's erase step reads the state before the
    decay. So for Comba the erase key of a document's first token has to be 0, too.
    """
    first = starts(seq_idx)
    return g.masked_fill(first.view(*first.shape, *[1] * (g.dim() - 2)), -torch.inf)


def starts(seq_idx: Tensor) -> Tensor:
    """[B, T] bool: the tokens that start a document after another one."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def refuse_restarts(position_ids: Tensor, attention_mask: Tensor | None, beside: str) -> None:
    """Refuse rows with several documents, if the host can read the values. It does not wait for those of a GPU, and a
    tracer has no values.

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
    """The numbers of documents [B or 1, T] from a layer's arguments. None if they are not needed.

    They are not needed without positions, with cu_seqlens, for one token, and with a state, where a row is one
    document.

    Raises:
        ValueError: if position_ids have another shape than [B, T] or [1, T], or restart although there is a state.
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
