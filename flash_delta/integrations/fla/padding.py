"""fla.layers.utils: turns padded batches into rows without padding and back, and reads and writes caches of all layers.
Models outside of fla import these."""

from typing import Any

import torch
from torch import Tensor, nn

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_shape

State = Tensor | tuple[Tensor, ...] | None


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """The results of :func:`get_unpad_indices_and_cu` for a mask [B, T], and the length of the longest sequence."""
    check_shape("get_unpad_data", "attention_mask", attention_mask, "B", "T")
    indices, bounds = get_unpad_indices_and_cu(attention_mask)
    return indices, bounds, int(bounds.diff().max())


def get_unpad_indices_and_cu(attention_mask: Tensor, q_len: int | None = None) -> tuple[Tensor, Tensor]:
    """The places of the tokens of a mask [B, T], or of its last q_len columns.

    Returns:
        The tokens' indices in the flattened batch, and the sequences' bounds ``cu_seqlens`` [B + 1] in int32. The host
        waits for the number of tokens.
    """
    check_shape("get_unpad_indices_and_cu", "attention_mask", attention_mask, "B", "T")
    mask = attention_mask if q_len is None else attention_mask[:, attention_mask.shape[1] - q_len :]
    bounds = torch.nn.functional.pad((mask != 0).sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
    return mask.flatten().nonzero().flatten(), bounds


def unpad_hidden_states(
    hidden_states: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, q_len: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(hidden_states, indices, cu_seqlens)``: [B, q_len, ...] without the padding of a mask, as a row [1, n, ...].

    With cu_seqlens, or without a mask, nothing is changed, and indices are None.
    """
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask, q_len)
    return index_first_axis(hidden_states.flatten(0, 1), indices)[None], indices, cu_seqlens


def repad_hidden_states(hidden_states: Tensor, indices: Tensor | None, batch_size: int, q_len: int) -> Tensor:
    """The inverse of :func:`unpad_hidden_states`. Without indices nothing is changed."""
    return hidden_states if indices is None else pad_input(hidden_states[0], indices, batch_size, q_len)


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


def require_cache_layer_idx(module: nn.Module, past_key_values: Any | None) -> int | None:
    """The layer's place in the cache, ``module.layer_idx``. ValueError if there is a cache and this is None."""
    layer_idx = getattr(module, "layer_idx", None)
    if past_key_values is not None and layer_idx is None:
        refuse(type(module).__name__, "layer_idx", "a number if the layer is called with past_key_values", "None")
    return layer_idx


def get_layer_cache(module: nn.Module, past_key_values: Any | None) -> Any | None:
    """What the cache has for this layer. None if there is no cache, or nothing yet."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    return None if past_key_values is None or len(past_key_values) <= layer_idx else past_key_values[layer_idx]


def update_layer_cache(
    module: nn.Module,
    past_key_values: Any | None,
    recurrent_state: State = None,
    conv_state: State = None,
    offset: int | None = None,
    attn_state: State = None,
    ffn_state: State = None,
) -> Any | None:
    """What ``past_key_values.update`` returns for this layer's new states and the number of its tokens, ``offset``.
    None without a cache."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if past_key_values is None:
        return None
    others = {"offset": offset, "attn_state": attn_state, "ffn_state": ffn_state}
    given = {name: value for name, value in others.items() if value is not None}
    return past_key_values.update(recurrent_state=recurrent_state, conv_state=conv_state, layer_idx=layer_idx, **given)
