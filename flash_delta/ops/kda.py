"""Kimi Delta Attention (KDA): the delta rule with one decay per key channel, value head and token."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.options import as_int, promised_bound, refuse
from flash_delta.ops._check.rule import refuse_unless_none, state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.ops._function import problem_of, run_tokens
from flash_delta.problem import Inputs


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    cp_context: Context | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    r"""Kimi Delta Attention over whole sequences, chunk by chunk; forward and backward.

    .. math::
        S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) \, S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H, value head h uses key head ``h // (HV // H)``.
        g: log decay in nats ``[B, T, HV, K]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw
            activation. A log decay may be as low as -1000 per token. Those above 0 are computed within limits
            (docs/guide/backends.md, "Decays at the limits").
        beta: write strength ``[B, T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor on the output. Default ``K ** -0.5``.
        initial_state: states that the sequences start from, ``[N, HV, K, V]``, any float dtype. N is B or the number of
            packed sequences. Default zeros.
        output_final_state: return the states at the sequences' ends. Default False.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms (eps 1e-6 inside the root). Default False.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``; with ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, where A_log may be None. In float32. Default False.
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta. Default False.
        allow_neg_eigval: True doubles the sigmoid, so beta reaches 2; None means False. If beta is given, it may be
            up to 2, and False states that it is at most 1 (docs/guide/backends.md, "Beta up to 2"). Default None.
        safe_gate: the caller promises that no log decay is below ``lower_bound``, which saves kernels work. With
            ``use_gate_in_kernel`` it needs ``lower_bound``. Without ``use_gate_in_kernel``, ``lower_bound`` None then
            means -5. Default False.
        lower_bound: the least log decay per token, in [-5, 0). If log decays are given (without
            ``use_gate_in_kernel``), a smaller one counts as the bound, and its gradient is 0. Default None: unbounded.
        disable_recompute: save A and one state per chunk for the backward pass, which then does not compute them again.
            Default False.
        return_intermediate_states: also return the state at the start of every chunk, for inference. On a GPU packed
            sequences then need ``cu_seqlens_cpu``, since the result's size depends on it. Default False.
        state_v_first: states are ``[N, HV, V, K]``. Default False.
        cu_seqlens: the bounds ``[N + 1]`` of packed sequences, int32 or int64, on q's device, with B = 1. They start at
            0, do not decrease and are at most T. Sequences may be empty. Tokens after the last sequence are zeros in o
            and in gradients. The host does not read bounds on a GPU. If they are wrong, results are undefined, but no
            kernel touches memory outside of the call's tensors.
        cu_seqlens_cpu: the same bounds on the host. If cu_seqlens is on a GPU, the op checks these instead. They also
            decide which sequences are split into segments; without them the mean length decides.
        cp_context: a :class:`flash_delta.parallel.ContextParallel`. Every tensor is then this rank's part of one packed
            row, and ``cu_seqlens`` stays None. Default None: one device.
        use_graph: ignored, since a captured call is right for any values in cu_seqlens. It is here so that calls
            written for fla run.
        max_num_seqs: None, or the number of sequences. The shape of cu_seqlens says the same.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it unless there is a ``lower_bound``.
        dt_bias: ``[HV * K]`` or None; for ``use_gate_in_kernel`` only.
        chunk_size: 16, 32 or 64 tokens, which the torch backend computes at once. It changes roundings, and with
            ``return_intermediate_states`` the number of states. Kernels compute 64 tokens at once. They leave a call
            that returns the states of smaller chunks to the torch backend. Default 64.
        batch_invariant: other sequences change no bit of a sequence's outputs and gradients. (The gradients of A_log
            and dt_bias are sums over all sequences.) Long sequences on few heads then take longer, since they are not
            split into segments. Default False.
        transpose_state_layout: an older name of ``state_v_first``.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs). With
        ``return_intermediate_states`` also the chunk states ``[B, chunks, HV, K, V]``, or with ``state_v_first``
        ``[B, chunks, HV, V, K]``, in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_kda
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, beta = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4)  # a decay per channel
        >>> o, state = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    op = "chunk_kda"
    lower_bound = promised_bound(op, safe_gate, use_gate_in_kernel, lower_bound)
    inputs = Inputs(q, k, v, g, beta, None, initial_state, A_log, dt_bias, cu_seqlens)
    options = {
        "op": op, "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "scale": scale,
        "chunk_size": chunk_size, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "keep_states": return_intermediate_states, "disable_recompute": disable_recompute,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    if cp_context is not None:
        refuse_unless_none(op, "max_num_seqs", max_num_seqs, "cp_context has the bounds")
    elif max_num_seqs is not None:
        N = problem_of(inputs, options, cu_seqlens_cpu).N
        expected = f"None or the number of sequences, {N}"
        if as_int(op, "max_num_seqs", max_num_seqs, expected, 0) != N:
            refuse(op, "max_num_seqs", expected, max_num_seqs)
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Kimi Delta Attention token by token, for decoding. The backward pass is that of the chunked op.

    .. math::
        S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) \, S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    T calls with one token each give the same bits as one call with T tokens, if each call passes its state to the next.
    All arguments mean the same as in :func:`chunk_kda`.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, any of these dtypes. If the dtypes of q, k and v differ, the op makes wider copies.
        v: values ``[B, T, HV, V]``, any of these dtypes.
        g: log decay in nats ``[B, T, HV, K]``, or the raw activation.
        beta: write strength ``[B, T, HV]``, or its logit.

    Returns:
        ``(o [B, T, HV, V] in v's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_recurrent_kda
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, beta = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4)
        >>> o, state = fused_recurrent_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> token = [x[:, -1:] for x in (q, k, v, g, beta)]  # one more token
        >>> o, state = fused_recurrent_kda(
        ...     *token, initial_state=state, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape
        torch.Size([2, 1, 4, 32])

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    op = "fused_recurrent_kda"
    inputs = Inputs(q, k, v, g, beta, None, initial_state, A_log, dt_bias, cu_seqlens)
    options = {
        "op": op, "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "scale": scale,
        "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
    }  # fmt: skip
    return run_tokens(inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend)
