"""fla.ops.simple_gla.naive: plain PyTorch in float32, which here is the torch backend."""

import torch
from torch import Tensor

from flash_delta.ops import chunk_simple_gla

__all__ = ["naive_chunk_simple_gla", "naive_parallel_simple_gla", "naive_recurrent_simple_gla"]


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
    return chunk_simple_gla(
        q.float(),
        k.float(),
        v.float(),
        g,
        None,
        scale,
        initial_state,
        output_final_state,
        chunk_size=chunk_size,
        backend="torch",
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
