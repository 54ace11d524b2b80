"""Simple gated linear attention: one decay per head and token, no delta rule."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.rule import check_shape, refuse_head_first, state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.problem import Inputs


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    *,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    cp_context: Context | None = None,
    head_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Simple gated linear attention over whole sequences, chunk by chunk; forward and backward.

    .. math::
        S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype. Default None: no decay.
        g_gamma: log decay per head ``[HV]``, the same for every token (RetNet). It is added to g. Default None.
        disable_recompute: save one state per chunk for the backward pass, which then does not compute these states
            again.

    ``scale``, ``initial_state``, ``output_final_state``, ``state_v_first`` (older name ``transpose_state_layout``),
    ``cu_seqlens``, ``cu_seqlens_cpu``, ``cp_context``, ``chunk_size``, ``batch_invariant``, ``head_first`` and
    ``backend`` mean the same as in :func:`flash_delta.chunk_gated_delta_rule`.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_simple_gla
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> o, _ = chunk_simple_gla(q, k, v, g=-torch.rand(2, 100, 4))
        >>> o.shape
        torch.Size([2, 100, 4, 32])

    Source: Yang et al., Gated Linear Attention, arXiv:2312.06635; one decay per head as in Mamba2, arXiv:2405.21060.
    """
    op = "chunk_simple_gla"
    refuse_head_first(op, head_first)
    if g_gamma is not None:
        B, T, HV, _ = check_shape(op, "v", v, "B", "T", "HV", "V")
        check_shape(op, "g_gamma", g_gamma, HV)
        g = g_gamma.expand(B, T, HV) if g is None else g + g_gamma
    inputs = Inputs(q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = {
        "op": op, "gate": ("none" if g is None else "scalar", False, None), "erase": None, "scale": scale,
        "chunk_size": chunk_size, "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "disable_recompute": disable_recompute, "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )
