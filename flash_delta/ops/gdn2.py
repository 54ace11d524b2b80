"""GDN-2: the delta rule with a decay and an erase gate per key channel, and a write gate per value channel."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.options import promised_bound
from flash_delta.ops._check.rule import state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.ops._function import run_tokens
from flash_delta.problem import Inputs


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Context | None = None,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    r"""GDN-2 over whole sequences, chunk by chunk; forward and backward.

    .. math::
        \tilde S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1}, \qquad
        S_t = \tilde S_t + k_t \left(w_t \odot v_t - \tilde S_t^\top (b_t \odot k_t)\right)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    If b and w are one number beta, it is :func:`flash_delta.chunk_kda`. All other arguments mean the same as there.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H, value head h uses key head ``h // (HV // H)``.
        g: log decay in nats ``[B, T, HV, K]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw
            activation.
        b: erase gate ``[B, T, HV, K]``, any float dtype, mostly from 0 to 1. It multiplies the key that erases, after
            the key's norm. With ``use_beta_sigmoid_in_kernel`` its logit.
        w: write gate ``[B, T, HV, V]``, any float dtype, mostly from 0 to 1. It multiplies the value. With
            ``use_beta_sigmoid_in_kernel`` its logit.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms (eps 1e-6 inside the root). Default False.
        use_beta_sigmoid_in_kernel: apply the sigmoid to b and to w. Default False.
        allow_neg_eigval: True doubles the sigmoid of b, so b reaches 2, and not that of w; None means False. If b is
            given, it may be up to 2, and False states that it is at most 1. Default None.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs). With
        ``return_intermediate_states`` also the chunk states ``[B, chunks, HV, K, V]``, or with ``state_v_first``
        ``[B, chunks, HV, V, K]``, in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    A state can grow even without a rising decay: for unit keys a token's erase stretches it by up to 1.155 if b is from
    0 to 1, and by up to 1.414 if b is from 0 to 2. With the same b in all channels it never does.
    :func:`flash_delta.erase_norm` says by how much. With the b of :func:`flash_delta.guard_erase` no state grows.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_gdn2
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, b, w = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4, 32)
        >>> o, state = chunk_gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))

    Source: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, as fla 0.6.0 defines it
    (``fla.ops.gdn2``).
    """
    op = "chunk_gdn2"
    lower_bound = promised_bound(op, safe_gate, use_gate_in_kernel, lower_bound)
    inputs = Inputs(q, k, v, g, None, None, initial_state, A_log, dt_bias, cu_seqlens, b, w)
    options = {
        "op": op, "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "channel_strength": True,
        "scale": scale, "chunk_size": chunk_size, "l2norm": use_qk_l2norm_in_kernel,
        "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
        "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "keep_states": return_intermediate_states, "disable_recompute": disable_recompute,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""GDN-2 token by token, for decoding. The backward pass is that of the chunked op.

    .. math::
        \tilde S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1}, \qquad
        S_t = \tilde S_t + k_t \left(w_t \odot v_t - \tilde S_t^\top (b_t \odot k_t)\right)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    T calls with one token each give the same bits as one call with T tokens, if each call passes its state to the next.
    All arguments mean the same as in :func:`chunk_gdn2` and :func:`flash_delta.chunk_kda`.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, any of these dtypes. If the dtypes of q, k and v differ, the op makes wider copies.
        v: values ``[B, T, HV, V]``, any of these dtypes.
        g: log decay in nats ``[B, T, HV, K]``, or the raw activation.
        b: erase gate ``[B, T, HV, K]``, or its logit.
        w: write gate ``[B, T, HV, V]``, or its logit.

    Returns:
        ``(o [B, T, HV, V] in v's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_recurrent_gdn2
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, b, w = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4, 32)
        >>> o, state = fused_recurrent_gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> token = [x[:, -1:] for x in (q, k, v, g, b, w)]  # one more token
        >>> o, state = fused_recurrent_gdn2(
        ...     *token, initial_state=state, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape
        torch.Size([2, 1, 4, 32])

    Source: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, as fla 0.6.0 defines it
    (``fla.ops.gdn2``).
    """
    op = "fused_recurrent_gdn2"
    inputs = Inputs(q, k, v, g, None, None, initial_state, A_log, dt_bias, cu_seqlens, b, w)
    options = {
        "op": op, "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "channel_strength": True,
        "scale": scale, "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
    }  # fmt: skip
    return run_tokens(inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend)
