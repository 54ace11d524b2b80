"""The loss of a language model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.loss.loss_utils import fixed_cross_entropy


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    num_items_in_batch: int | Tensor | None,
) -> Tensor:
    """Cross entropy of logits [B, T, vocab] at t against labels [B, T] at t + 1, within each sequence. Sequences are
    given by bounds ``cu_seqlens``, or as tokens with the same number in ``seq_idx`` [B or 1, T]."""
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels: expected shape [B, T] = {list(logits.shape[:2])}, got {list(labels.shape)}")
    targets = labels[:, 1:]
    if cu_seqlens is not None:
        tokens = torch.arange(labels.shape[1], device=labels.device)
        sequence = torch.searchsorted(cu_seqlens.long(), tokens, right=True)
        same = (sequence[1:] == sequence[:-1]) & (tokens[1:] < cu_seqlens[-1])
        targets = targets.where(same, -100)
    if seq_idx is not None:
        targets = targets.where(seq_idx[:, 1:] == seq_idx[:, :-1], -100)
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return fixed_cross_entropy(logits.flatten(0, 1), targets.flatten(), num_items_in_batch)
