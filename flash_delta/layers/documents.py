"""Documents side by side in rows [B, T], told by positions that restart at 0, and kept apart on the device.

``seq_idx`` [B, T] numbers the documents of a row: a token may see those of its own number. That takes the place of
bounds where nobody counted the documents: its shape does not depend on how many there are, and no value is read. Bounds
of that many sequences would have to allow for B T of them, and a kernel starts programs for every sequence there may be.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.layers.packing import check_positions


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

    That separates wherever the erase reads the decayed state: Gated DeltaNet and KDA, and not Comba.
    """
    first = starts(seq_idx)
    return g.masked_fill(first.view(*first.shape, *[1] * (g.dim() - 2)), -torch.inf)


def starts(seq_idx: Tensor) -> Tensor:
    """[B, T] bool: the tokens that start a document behind another one."""
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))


def refuse_restarts(position_ids: Tensor, attention_mask: Tensor | None = None) -> None:
    """Refuse documents where rows have to be one each, if the host sees the values: those of a GPU it would wait for,
    and a tracer has none.

    Raises:
        ValueError: if positions on a CPU restart.
    """
    if position_ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if bool((number_documents(position_ids, attention_mask) > 0).any()):
        raise ValueError(
            "position_ids: expected one document per row together with a cache or state, got positions that restart at "
            "0: give use_cache=False, or every document a row of its own"
        )


def read_documents(
    hidden_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, keeps_state: bool
) -> Tensor | None:
    """The numbers of a layer's documents [B or 1, T]; None without positions, and where rows are one document each.

    Args:
        hidden_states: [B, T, D].
        position_ids: [B, T] or [1, T], or None.
        attention_mask: a layer's, checked; see `number_documents`.
        keeps_state: whether the call starts from a state or leaves one. A row is one document then.

    Raises:
        ValueError: if position_ids have another shape, or restart beside a state.
    """
    if position_ids is None:
        return None
    check_positions(hidden_states, position_ids)
    if position_ids.shape[1] == 1:  # decoding
        return None
    if keeps_state:
        refuse_restarts(position_ids, attention_mask)
        return None
    return number_documents(position_ids, attention_mask)
