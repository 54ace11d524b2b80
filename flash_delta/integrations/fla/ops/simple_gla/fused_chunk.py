"""fla.ops.simple_gla.fused_chunk."""

from torch import Tensor

from flash_delta.ops import chunk_simple_gla

__all__ = ["fused_chunk_simple_gla"]


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla`."""
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first=False, cu_seqlens=cu_seqlens
    )
