"""fla.layers.utils: turns padded batches into rows without padding and back. Models outside of fla import these."""

import torch
from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_shape

__all__ = ["get_unpad_data", "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]

Indexed = tuple[Tensor, Tensor, int]


def get_unpad_data(attention_mask: Tensor) -> Indexed:
    """The places of the tokens of a mask [B, T].

    Returns:
        The tokens' indices in the flattened batch, the sequences' bounds ``cu_seqlens`` [B + 1] in int32, and the
        length of the longest sequence. The host waits for this length.
    """
    check_shape("get_unpad_data", "attention_mask", attention_mask, "B", "T")
    lengths = (attention_mask != 0).sum(-1)
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return attention_mask.flatten().nonzero().flatten(), bounds, int(lengths.max())


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` [n] of x [N, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of :func:`index_first_axis`: zeros [first_axis_dim, ...] with the rows of x [n, ...] in them."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy(0, indices, x)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """Rows without padding [n, ...] -> the padded batch [batch_size, seq_len, ...], which has zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch_size * seq_len)
    return rows.view(batch_size, seq_len, *rows.shape[1:])


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Queries [B, q_len, ...] and states [B, T, ...] without their padding.

    Args:
        q: a tensor or several; q_len is T, or 1 for one token of every sequence.
        states: a tensor or several, for the tokens of the mask.
        attention_mask: [B, T].
        keepdim: whether results are [1, n, ...]. Default False: [n, ...].

    Returns:
        q and states; the indices of the queries; the bounds ``cu_seqlens`` of both; the greatest lengths of both.
    """
    B, T = states[0].shape[:2]
    indices, bounds, longest = get_unpad_data(attention_mask)
    queries = (q,) if isinstance(q, Tensor) else tuple(q)
    states = tuple(index_first_axis(s.flatten(0, 1), indices) for s in states)
    if q_len == T:
        queries = tuple(index_first_axis(x.flatten(0, 1), indices) for x in queries)
        of_queries = indices, bounds, longest
    elif q_len == 1:
        each = torch.arange(B + 1, dtype=torch.int32, device=queries[0].device)
        queries = tuple(x.squeeze(1) for x in queries)
        of_queries = each[:-1], each, 1
    else:
        refuse("unpad_input", "q_len", f"{T}, the length of states, or 1", q_len)
    if keepdim:
        queries, states = (tuple(x.unsqueeze(0) for x in group) for group in (queries, states))
    found = queries[0] if isinstance(q, Tensor) else queries
    return found, states, of_queries[0], (of_queries[1], bounds), (of_queries[2], longest)
