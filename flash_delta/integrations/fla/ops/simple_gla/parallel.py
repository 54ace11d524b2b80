"""fla.ops.simple_gla.parallel."""

from torch import Tensor

from flash_delta.ops import chunk_simple_gla
from flash_delta.ops._check.options import refuse

__all__ = ["parallel_simple_gla"]


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """:func:`flash_delta.chunk_simple_gla`, with None for the attention weights, which are not computed."""
    if output_attentions:
        refuse("parallel_simple_gla", "output_attentions", "False (the weights are never computed)", output_attentions)
    o, _ = chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return o, None
