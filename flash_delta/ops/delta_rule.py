"""The delta rule without a gate (DeltaNet), and with several updates per token (Gated DeltaProduct)."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.options import as_size
from flash_delta.ops._check.rule import refuse_head_first, state_layout
from flash_delta.ops._check.updates import by_tokens, by_updates, run_updates
from flash_delta.ops._context import Context, run_chunks
from flash_delta.ops._function import run_tokens
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


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: Context | None = None,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated DeltaProduct over whole sequences, chunk by chunk: n updates of the state per token; forward and backward.

    .. math::
        S_{t,0} = e^{g_t} S_{t-1}, \qquad
        S_{t,j} = S_{t,j-1} + \beta_{tj} k_{tj} (v_{tj} - S_{t,j-1}^\top k_{tj})^\top \quad (j = 1 \ldots n), \qquad
        S_t = S_{t,n}, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    It runs as the gated delta rule on n T rows, so it costs about n times as much. Its backends are those of
    :func:`flash_delta.chunk_gated_delta_rule`, where arguments that are not listed here mean the same.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, n T, H, K]``, dtype of q. The n updates of token t are rows ``n t`` to ``n t + n - 1``.
        v: values ``[B, n T, HV, V]``, dtype of q; HV a multiple of H.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype; one per token. None: no decay. It is the decay
            itself: apply :func:`flash_delta.fused_gdn_gate` to a raw activation.
        beta: write strength ``[B, n T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        num_householder: the number n of updates per token, at least 1. With 1 it is the gated delta rule.
        cu_seqlens: the bounds ``[N + 1]`` of packed sequences. They count tokens, also on the host (cu_seqlens_cpu).
        chunk_size: 16, 32 or 64 updates, which the torch backend computes at once. Default 64.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_gated_delta_product
        >>> q, g = torch.randn(2, 50, 2, 32), -torch.rand(2, 50, 4)  # one of each per token
        >>> k, v = torch.randn(2, 100, 2, 32), torch.randn(2, 100, 4, 32)  # two
        >>> o, _ = chunk_gated_delta_product(
        ...     q, k, v, g, beta=torch.rand(2, 100, 4), num_householder=2, use_qk_l2norm_in_kernel=True
        ... )
        >>> o.shape
        torch.Size([2, 50, 4, 32])

    Source: Siems et al., DeltaProduct, arXiv:2502.10297.
    """
    op = "chunk_gated_delta_product"
    n = as_size(op, "num_householder", num_householder)
    inputs = Inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = {
        "op": op, "gate": ("none" if g is None else "scalar", False, None), "erase": "decayed", "scale": scale,
        "chunk_size": chunk_size, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "disable_recompute": disable_recompute,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_updates(
        n, inputs, options, cu_seqlens_cpu, cp_context, output_final_state=output_final_state, backend=backend
    )


def fused_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated DeltaProduct update by update, for decoding. The backward pass is that of the chunked op.

    .. math::
        S_{t,0} = e^{g_t} S_{t-1}, \qquad
        S_{t,j} = S_{t,j-1} + \beta_{tj} k_{tj} (v_{tj} - S_{t,j-1}^\top k_{tj})^\top \quad (j = 1 \ldots n), \qquad
        S_t = S_{t,n}, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    T calls with one token each give the same bits as one call with T tokens, if each call passes its state to the next.
    Arguments that are not listed here mean the same as in :func:`flash_delta.chunk_gated_delta_product` and
    :func:`flash_delta.chunk_gated_delta_rule`.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, n T, H, K]``, any of these dtypes. If the dtypes of q, k and v differ, the op makes wider copies.
        v: values ``[B, n T, HV, V]``, any of these dtypes.
        g: log decay in nats ``[B, T, HV]``; None: no decay.
        beta: write strength ``[B, n T, HV]``.
        num_householder: the number n of updates per token, at least 1.
        cu_seqlens: the bounds ``[N + 1]`` of packed sequences. They count tokens, also on the host (cu_seqlens_cpu).

    Returns:
        ``(o [B, T, HV, V] in v's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_recurrent_gated_delta_product
        >>> q, g = torch.randn(2, 1, 2, 32), -torch.rand(2, 1, 4)  # a token
        >>> k, v = torch.randn(2, 3, 2, 32), torch.randn(2, 3, 4, 32)  # its three updates
        >>> o, state = fused_recurrent_gated_delta_product(
        ...     q, k, v, g, torch.rand(2, 3, 4), 3, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 4, 32]), torch.Size([2, 4, 32, 32]))

    Source: Siems et al., DeltaProduct, arXiv:2502.10297.
    """
    op = "fused_recurrent_gated_delta_product"
    n = as_size(op, "num_householder", num_householder)
    inputs = Inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    inputs, bounds, _ = by_updates(op, n, inputs, cu_seqlens_cpu)
    if g is None:  # the decoding kernel needs a decay; a log decay of 0 is exact
        inputs = inputs._replace(g=v.new_zeros(v.shape[:3]))
    options = {
        "op": op, "gate": ("scalar", False, None), "erase": "decayed", "scale": scale, "recurrent": True,
        "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first,
    }  # fmt: skip
    found = run_tokens(inputs, options, bounds, output_final_state=output_final_state, backend=backend)
    return by_tokens(n, found)
