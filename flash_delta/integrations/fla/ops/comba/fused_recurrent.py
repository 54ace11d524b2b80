"""fla.ops.comba.fused_recurrent."""

from torch import Tensor

from flash_delta.ops import chunk_comba

__all__ = ["fused_recurrent_comba"]


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_comba`, which is the same function; p stands before v."""
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
