"""fla.ops.gated_delta_rule.naive: plain PyTorch in float32, which here is the torch backend."""

from torch import Tensor

from flash_delta.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


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
    return fused_recurrent_gated_delta_rule(
        q.float(),
        k.float(),
        v.float(),
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend="torch",
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
    return chunk_gated_delta_rule(
        q.float(),
        k.float(),
        v.float(),
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        chunk_size=chunk_size,
        backend="torch",
    )
