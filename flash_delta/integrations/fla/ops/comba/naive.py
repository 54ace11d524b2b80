"""fla.ops.comba.naive: plain PyTorch in float32, which here is the torch backend."""

from torch import Tensor

from flash_delta.ops import chunk_comba


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
    return chunk_comba(
        q.float(),
        k.float(),
        v.float(),
        p.float(),
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        chunk_size=chunk_size,
        backend="torch",
    )
