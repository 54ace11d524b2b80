"""The naive functions of fla.ops: plain PyTorch in float32, which here is the torch backend.

Tensors of the delta rule's are [B, H, T, ...], as in fla.
"""

import torch
from torch import Tensor

from flash_delta.ops import (
    chunk_comba,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    chunk_simple_gla,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)
from flash_delta.ops._check.options import refuse


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.fused_recurrent_gated_delta_rule` in float32 on the torch backend; beta stands before g."""
    q, k, v = (x.float() for x in (q, k, v))
    return fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state, backend="torch"
    )


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_gated_delta_rule` in float32 on the torch backend."""
    q, k, v = (x.float() for x in (q, k, v))
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=chunk_size, backend="torch"
    )


def naive_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    num_householder: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.fused_recurrent_gated_delta_product` in float32 on the torch backend; o has q's dtype. As in
    fla, the final state always comes."""
    x, sizes = [x.float() for x in (q, k, v)], (num_householder, scale)
    o, S = fused_recurrent_gated_delta_product(
        *x, g, beta, *sizes, initial_state, output_final_state=True, cu_seqlens=cu_seqlens, backend="torch"
    )
    return o.to(q.dtype), S


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.fused_recurrent_kda` in float32 on the torch backend."""
    q, k, v = (x.float() for x in (q, k, v))
    return fused_recurrent_kda(q, k, v, g, beta, None, None, scale, initial_state, output_final_state, backend="torch")


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_kda` in float32 on the torch backend."""
    q, k, v = (x.float() for x in (q, k, v))
    return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=chunk_size, backend="torch")


def naive_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.fused_recurrent_gdn2` in float32 on the torch backend; o has v's dtype."""
    x = [x.float() for x in (q, k, v)]
    o, S = fused_recurrent_gdn2(*x, g, b, w, None, None, scale, initial_state, output_final_state, backend="torch")
    return o.to(v.dtype), S


def naive_chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_gdn2` in float32 on the torch backend; o has v's dtype."""
    x = [x.float() for x in (q, k, v)]
    o, S = chunk_gdn2(*x, g, b, w, scale, initial_state, output_final_state, chunk_size=chunk_size, backend="torch")
    return o.to(v.dtype), S


def naive_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_comba` in float32 on the torch backend; beta stands before g."""
    return naive_chunk_comba(q, k, v, p, g, beta, 64, scale, initial_state, output_final_state)


def naive_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_comba` in float32 on the torch backend."""
    q, k, v, p = (x.float() for x in (q, k, v, p))
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, chunk_size=chunk_size, backend="torch"
    )


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_delta_rule` in float32 of q, k [B, H, T, K], v [B, H, T, V], beta [B, H, T]; o in q's
    dtype."""
    if beta.dim() == v.dim():
        refuse("delta_rule_recurrence", "beta", "one number per head and token, [B, H, T]", f"{list(beta.shape)}")
    o, state = _heads_first(q.float(), k.float(), v.float(), beta.float(), 64, initial_state, output_final_state)
    return o.to(q.dtype), state


def delta_rule_chunkwise(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32) -> tuple[Tensor, Tensor]:
    """:func:`flash_delta.chunk_delta_rule` of tensors [B, H, T, ...]; the final state is always returned."""
    return _heads_first(q, k, v, beta, chunk_size, None, True)


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int, initial_state: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    o, state = chunk_delta_rule(q, k, v, beta, None, initial_state, final, chunk_size=chunk_size, backend="torch")
    return o.transpose(1, 2), state


def naive_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla` in float32 on the torch backend."""
    q, k, v = (x.float() for x in (q, k, v))
    return chunk_simple_gla(
        q, k, v, g, None, scale, initial_state, output_final_state, chunk_size=chunk_size, backend="torch"
    )


def naive_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla` in float32 on the torch backend, with o in q's dtype."""
    o, state = naive_chunk_simple_gla(q, k, v, g, initial_state, output_final_state, scale=scale)
    return o.to(q.dtype), state


def naive_parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`flash_delta.chunk_simple_gla` in float32 on the torch backend. It returns o, and the weights [B, HV, T, T]
    of the values in o."""
    B, T, HV, _ = v.shape
    one_hot = torch.eye(T, device=v.device)[None, :, None].expand(B, T, HV, T)  # with these values, o is the weights
    weights, _ = naive_chunk_simple_gla(q, k, one_hot, g, scale=scale)
    weights = weights.transpose(1, 2)
    return (weights @ v.float().transpose(1, 2)).transpose(1, 2), weights
