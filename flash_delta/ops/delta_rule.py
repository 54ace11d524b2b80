"""The delta rule without a gate (DeltaNet)."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.rule import refuse_head_first, state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.problem import Inputs


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    cp_context: Context | None = None,
    head_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Delta rule over whole sequences, chunk by chunk; forward and backward.

    .. math::
        S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    All arguments mean the same as in :func:`flash_delta.chunk_gated_delta_rule`. There is no log decay ``g``.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H.
        beta: write strength ``[B, T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_delta_rule
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> o, _ = chunk_delta_rule(q, k, v, beta=torch.rand(2, 100, 4), use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([2, 100, 4, 32])

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484.
    """
    op = "chunk_delta_rule"
    refuse_head_first(op, head_first)
    inputs = Inputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = {
        "op": op, "gate": ("none", False, None), "erase": "decayed", "scale": scale, "chunk_size": chunk_size,
        "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
        "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "disable_recompute": disable_recompute, "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )
