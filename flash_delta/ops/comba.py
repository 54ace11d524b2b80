"""Comba: the gated delta rule with erase keys of its own, which read the state before its decay."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.rule import state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.problem import Inputs


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    cp_context: Context | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Comba over whole sequences, chunk by chunk; forward and backward.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top p_t)^\top, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    The keys p erase from :math:`S_{t-1}`, which is the state before its decay. The kernels of fla do the same.
    Arguments that are not listed here mean the same as in :func:`flash_delta.chunk_gated_delta_rule`.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: write keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H.
        p: erase keys ``[B, T, H, K]``, dtype of q. None means k.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw activation.
        beta: write strength ``[B, T, HV]``, any float dtype. Default None: 1.
        use_qk_l2norm_in_kernel: divide q, k and p by their L2 norms (eps 1e-6 inside the root). Default False.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_comba
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
        >>> p = 0.5 * k  # what erases: a share of what writes
        >>> o, _ = chunk_comba(q, k, v, p, g, beta)
        >>> o.shape
        torch.Size([2, 100, 4, 32])

    Source: Hu et al., Comba, arXiv:2506.02475.
    """
    op = "chunk_comba"
    inputs = Inputs(q, k, v, g, beta, p, initial_state, A_log, dt_bias, cu_seqlens)
    options = {
        "op": op, "gate": ("scalar", use_gate_in_kernel, None), "erase": "undecayed", "optional_beta": True,
        "scale": scale, "chunk_size": chunk_size, "l2norm": use_qk_l2norm_in_kernel,
        "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
        "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "disable_recompute": disable_recompute, "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )
