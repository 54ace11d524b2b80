"""fla.ops.simple_gla.fused_recurrent."""

from torch import Tensor

from flash_delta.ops import chunk_simple_gla
from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import state_layout

__all__ = ["fused_recurrent_simple_gla"]


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla`; ``reverse`` has to be False."""
    op = "fused_recurrent_simple_gla"
    if reverse:
        refuse(op, "reverse", "False (flip q, k, v and g along the tokens, then o)", reverse)
    return chunk_simple_gla(
        q,
        k,
        v,
        g,
        g_gamma,
        scale,
        initial_state,
        output_final_state,
        state_layout(op, state_v_first, transpose_state_layout),
        cu_seqlens,
    )
