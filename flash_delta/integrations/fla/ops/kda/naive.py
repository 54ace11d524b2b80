"""fla.ops.kda.naive: plain PyTorch in float32, which here is the torch backend."""

from torch import Tensor

from flash_delta.ops import chunk_kda, fused_recurrent_kda

__all__ = ["naive_chunk_kda", "naive_recurrent_kda"]


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
    return fused_recurrent_kda(
        q.float(),
        k.float(),
        v.float(),
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend="torch",
    )


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
    return chunk_kda(
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
