"""Gated DeltaNet (GDN): the delta rule with one decay per value head and token."""

from collections.abc import Sequence

from torch import Tensor

from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_shape, refuse_head_first, refuse_unless_none, state_layout
from flash_delta.ops._context import Context, run_chunks
from flash_delta.ops._function import run_tokens
from flash_delta.problem import Inputs


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Context | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    disable_recompute: bool = False,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule over whole sequences, chunk by chunk; forward and backward.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^\top k_t)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H, value head h uses key head ``h // (HV // H)``.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw activation.
            Those above 0 are computed within limits (docs/guide/backends.md, "Decays at the limits").
        beta: write strength ``[B, T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor on the output. Default ``K ** -0.5``.
        initial_state: states that the sequences start from, ``[N, HV, K, V]``, any float dtype. N is B or the number of
            packed sequences. Default zeros.
        output_final_state: return the states at the sequences' ends. Default False.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms (eps 1e-6 inside the root). Default False.
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta. Default False.
        allow_neg_eigval: True doubles the sigmoid, so beta reaches 2; None means False. If beta is given, it may be
            up to 2, and False states that it is at most 1 (docs/guide/backends.md, "Beta up to 2"). Default None.
        state_v_first: states are ``[N, HV, V, K]``. Default False.
        cu_seqlens: the bounds ``[N + 1]`` of packed sequences, int32 or int64, on q's device, with B = 1. They start at
            0, do not decrease and are at most T. Sequences may be empty. Tokens after the last sequence are zeros in o
            and in gradients. The host does not read bounds on a GPU. If they are wrong, results are undefined, but no
            kernel touches memory outside of the call's tensors.
        cu_seqlens_cpu: the same bounds on the host. If cu_seqlens is on a GPU, the op checks these instead. They also
            decide which sequences are split into segments; without them the mean length decides.
        chunk_indices: ignored, since kernels find chunks from cu_seqlens. It is here so that calls written for fla run.
        cp_context: a :class:`flash_delta.parallel.ContextParallel`. Every tensor is then this rank's part of one packed
            row, and ``cu_seqlens`` stays None. Default None: one device.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``, in float32. Default False.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it.
        dt_bias: ``[HV]`` or None; for ``use_gate_in_kernel`` only.
        chunk_size: 16, 32 or 64 tokens, which the torch backend computes at once. It changes roundings only. Kernels
            always compute 64 tokens at once. Default 64.
        disable_recompute: save A and one state per chunk for the backward pass, which then does not compute them again.
            Default False.
        batch_invariant: other sequences change no bit of a sequence's outputs and gradients. (The gradients of A_log
            and dt_bias are sums over all sequences.) Long sequences on few heads then take longer, since they are not
            split into segments. Default False.
        transpose_state_layout: an older name of ``state_v_first``.
        head_first: must be False. It is here because older calls of fla pass it.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Returns:
        ``(o [B, T, HV, V] in q's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import chunk_gated_delta_rule
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
        >>> o, state = chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    op = "chunk_gated_delta_rule"
    refuse_head_first(op, head_first)
    inputs = Inputs(q, k, v, g, beta, None, initial_state, A_log, dt_bias, cu_seqlens)
    options = {
        "op": op, "gate": ("scalar", use_gate_in_kernel, None), "erase": "decayed", "scale": scale,
        "chunk_size": chunk_size, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_layout(op, state_v_first, transpose_state_layout),
        "disable_recompute": disable_recompute, "batch_invariant": batch_invariant,
    }  # fmt: skip
    return run_chunks(
        cp_context, inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | Sequence[int] | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule token by token, for decoding. The backward pass is that of the chunked op.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^\top k_t)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    T calls with one token each give the same bits as one call with T tokens, if each call passes its state to the next.
    Arguments that are not listed here mean the same as in :func:`chunk_gated_delta_rule`.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16, float32 or float64.
        k: keys ``[B, T, H, K]``, any of these dtypes. If the dtypes of q, k and v differ, the op makes wider copies.
        v: values ``[B, T, HV, V]``, any of these dtypes.
        g: log decay in nats ``[B, T, HV]``. Default None: no decay.
        gk: log decay per key channel ``[B, T, HV, K]``, which is added to g. It must be None with
            ``use_gate_in_kernel``. Default None.
        gv: must be None. A decay per value channel is not part of this family.
        beta: write strength ``[B, T, HV]``. Default None: 1.

    Returns:
        ``(o [B, T, HV, V] in v's dtype, final_state or None)``; states are float32 (float64 for float64 inputs).

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import fused_recurrent_gated_delta_rule
        >>> q, k, v = (torch.randn(2, 100, heads, 32) for heads in (2, 2, 4))  # [B, T, heads, width]
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> whole, _ = fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)
        >>> tokens, state = [], None
        >>> for t in range(100):
        ...     token = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        ...     o, state = fused_recurrent_gated_delta_rule(
        ...         *token[:4], beta=token[4], initial_state=state, output_final_state=True
        ...     )
        ...     tokens.append(o)
        >>> torch.equal(torch.cat(tokens, 1), whole)
        True

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    op = "fused_recurrent_gated_delta_rule"
    if gv is not None:
        refuse(op, "gv", "None (a decay per value channel is not part of this family)", type(gv).__name__)
    if use_gate_in_kernel:
        refuse_unless_none(op, "gk", gk, "with use_gate_in_kernel=True the decay comes from g alone")
    kind = "none" if g is None and not use_gate_in_kernel else "scalar"
    if gk is not None:
        B, T, HV, _ = check_shape(op, "gk", gk, "B", "T", "HV", "K")
        if g is not None:
            check_shape(op, "g", g, B, T, HV)
            gk = gk + g.unsqueeze(-1)
        g, kind = gk, "channel"
    if transpose_state_layout is not None:
        state_v_first = state_layout(op, state_v_first, transpose_state_layout)
    inputs = Inputs(q, k, v, g, beta, None, initial_state, A_log, dt_bias, cu_seqlens)
    options = {
        "op": op, "gate": (kind, use_gate_in_kernel, None), "erase": "decayed", "optional_beta": True, "scale": scale,
        "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
    }  # fmt: skip
    return run_tokens(inputs, options, cu_seqlens_cpu, output_final_state=output_final_state, backend=backend)
