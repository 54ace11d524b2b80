"""Prompts, whole or in pieces, for sequences whose states lie in the slots of a pool, in place."""

from torch import Tensor

from flash_delta.ops.serving._run import run
from flash_delta.ops.serving.around import Convolution, OutputNorm, around_of
from flash_delta.problem import Inputs, Slots


def prefill_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    max_prompts: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    batch_invariant: bool = False,
    convolution: Convolution | None = None,
    output_norm: OutputNorm | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    *,
    state_v_first: bool,
    backend: str | None = None,
) -> Tensor:
    r"""Continue N sequences of any lengths, packed in one row, from their states in a pool. For inference only.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^\top k_t)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    chunk by chunk. States between chunks are float32. Sequence n starts from the state in slot ``read_indices[n]``, or
    from zeros, and leaves its last state in slot ``write_indices[n]``. A sequence of length 0 copies its state. A
    sequence of 1 to 16 tokens runs token by token, so a batch may hold prompts and decoding rows. If ``max_prompts``
    says how many longer sequences there are at most, a GPU need not search for them.

    With ``batch_invariant`` all sequences run in chunks, in a way that does not depend on how many there are. Then no
    sequence changes a bit of another one's results. With a float32 pool, a prompt may also be cut at any multiple of 64
    tokens from its start: a sequence that continues from a checkpoint gives the same bits as the sequence that wrote
    it. Without ``batch_invariant`` this holds only between calls with the same number of sequences of more than 16
    tokens. It never holds for prompts so long that a Hopper GPU scans them in parts (:func:`flash_delta.explain`).

    With ``checkpoint_offsets`` each sequence leaves one checkpoint, after any number of its tokens in this call. Offset
    0 copies the initial state, or zeros if there is none. The length of the sequence saves the final state, bit for
    bit. A multiple of 64 gives the same bits as a checkpoint at a stride. Any other offset takes longer: the tokens
    from the last multiple of 64 before it, at most 63, are computed once more, one by one. They start from the state at
    that multiple, rounded to the pool's dtype, or from the initial state; states between them are float32. So with a
    float32 pool such a checkpoint has the same bits as ``decode_*`` calls that continue from a checkpoint at that
    multiple. A sequence that continues from it has other chunks than the sequence that wrote it, and rounds
    differently. Checkpoints of either kind change no output and no final state.

    With ``convolution`` and ``output_norm`` the call does everything that a layer does between its projections. It
    reads and writes the convolution's window together with each state, at checkpoints, too. Without an initial state
    the window is zeros.

    Kernels check every index. On a GPU the host reads neither indices nor lengths, so a call can be captured in a CUDA
    graph and replayed with others. An index below 0, or of ``slots`` or more, is padding. A sequence that lacks a slot
    to read (if it has an initial state) or a slot to write (if there are ``write_indices``) gives zeros and writes
    nothing. A checkpoint without a slot is not written. No sequence may use a slot that another one writes, and none
    may write a slot twice. On a CPU such a call is refused. On a GPU these sequences' results are undefined.

    Args:
        q: queries ``[1, T, H, K]``; float16, bfloat16 or float32. q, k, v, g and beta may have any strides.
        k: keys ``[1, T, H, K]``, dtype of q.
        v: values ``[1, T, HV, V]``, dtype of q; HV a multiple of H, value head h uses key head ``h // (HV // H)``.
        g: log decay in nats ``[1, T, HV]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw activation.
        beta: write strength ``[1, T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        state_pool: ``[slots, HV, V, K]`` if ``state_v_first``, else ``[slots, HV, K, V]``; float32, bfloat16 or
            float16, any strides (slots may be padded); written in place.
        cu_seqlens: the bounds of the sequences ``[N + 1]``, int32 or int64, from 0 on, not decreasing. Tokens after the
            last bound give zeros, whatever they are. Wrong bounds on a GPU give undefined results. Even then, only
            those slots of the pool may change that ``write_indices`` and ``checkpoint_indices`` name.
        read_indices: the slots of initial states ``[N]``. All indices are int32 or int64.
        write_indices: the slots of final states ``[N]``. Default None: they are not written. A sequence may write the
            slot that it reads.
        has_initial_state: ``[N]``, bool. A sequence with False starts from zeros, and its read index is ignored.
            Default None: all have a state.
        checkpoint_indices: ``[N, M]``; the state after ``(m + 1) * checkpoint_every`` tokens of sequence n goes to slot
            ``checkpoint_indices[n, m]``, if the sequence is that long. With ``checkpoint_offsets`` ``[N]``. Default
            None: no checkpoints.
        checkpoint_every: tokens from one checkpoint to the next, a multiple of 64; needed beside
            ``checkpoint_indices``, unless there are ``checkpoint_offsets``. Default None.
        checkpoint_offsets: ``[N]``, int32 or int64. The state after the first ``checkpoint_offsets[n]`` tokens of
            sequence n goes to slot ``checkpoint_indices[n]``. An offset below 0 or beyond the sequence's length leaves
            no checkpoint. Default None: checkpoints come at a stride, if there are any.
        max_prompts: at most this many sequences have more than 16 tokens. It decides what a GPU launches, not what it
            computes: if there are more after all, the call takes longer. With ``batch_invariant`` it decides nothing,
            because all sequences run alike. Default None: any number.
        scale: factor on the output. Default ``K ** -0.5``.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms (eps 1e-6 inside the root). Default False.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``, in float32. Default False.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it.
        dt_bias: ``[HV]`` or None; for ``use_gate_in_kernel`` only.
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta. Default False.
        allow_neg_eigval: True doubles the sigmoid, so beta reaches 2; None means False. If beta is given, it may be
            up to 2, and False states that it is at most 1 (docs/guide/backends.md, "Beta up to 2"). Default None.
        batch_invariant: as above. Short sequences then take longer. Default False.
        convolution: a short convolution with SiLU, applied to q, k and v first
            (:class:`flash_delta.ops.serving.Convolution`). Its results are rounded to the dtype of q, k and v. Default
            None.
        output_norm: a gated norm, applied to o last, after o was rounded to q's dtype
            (:class:`flash_delta.ops.serving.OutputNorm`). Default None.
        null_slot: an index that also counts as padding, as if it were out of range. vLLM pads with slot 0. Default
            None: only indices out of range are padding.
        out: the tensor that o is written to, ``[1, T, HV, V]`` in q's dtype, contiguous. Its address must be a multiple
            of 16 bytes. It must not share memory with another argument, which is checked for the first call of its
            kind. Default None: new memory.
        state_v_first: the layout of ``state_pool``. It has no default: with K = V no shape would show a mistake.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Returns:
        ``o [1, T, HV, V]`` in q's dtype, without gradient; ``out`` if it is given.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import prefill_gated_delta_rule
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(1, 90, heads, 32) for heads in (2, 2, 4))  # prompts of 70 and 20 tokens
        >>> g, beta = -torch.rand(1, 90, 4), torch.rand(1, 90, 4)
        >>> bounds, slots = torch.tensor([0, 70, 90]), torch.tensor([5, 0])
        >>> o = prefill_gated_delta_rule(
        ...     q, k, v, g, beta, pool, bounds, slots, slots,
        ...     has_initial_state=torch.tensor([False, False]), use_qk_l2norm_in_kernel=True, state_v_first=True,
        ... )
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([1, 90, 4, 32]), [0, 5])

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.
    """
    inputs = Inputs(q, k, v, g, beta, None, None, A_log, dt_bias, cu_seqlens)
    checkpoints = (checkpoint_indices, checkpoint_offsets)
    slots = Slots(state_pool, read_indices, write_indices, None, None, has_initial_state, *checkpoints, out)
    around, layer = around_of("prefill_gated_delta_rule", convolution, output_norm)
    options = {
        "op": "prefill_gated_delta_rule", "gate": ("scalar", use_gate_in_kernel, None), "erase": "decayed",
        "scale": scale, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "batch_invariant": batch_invariant,
        "pools": (*layer, null_slot, checkpoint_every, max_prompts),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)


def prefill_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    max_prompts: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    batch_invariant: bool = False,
    convolution: Convolution | None = None,
    output_norm: OutputNorm | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    *,
    state_v_first: bool,
    backend: str | None = None,
) -> Tensor:
    r"""Continue sequences from their states in a pool, with Kimi Delta Attention: one decay per key channel.

    .. math::
        S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) \, S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    The pool, its indices and bits are as in :func:`prefill_gated_delta_rule`, with one exception: on Hopper GPUs and
    with few heads, ``max_prompts`` may change roundings, since it may select other kernels
    (docs/guide/backends.md). Arguments that are not listed here also mean the same as there.

    Args:
        g: log decay in nats ``[1, T, HV, K]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw
            activation.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``; with ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, where A_log may be None. In float32. Default False.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it unless there is a ``lower_bound``.
        dt_bias: ``[HV * K]`` or None; for ``use_gate_in_kernel`` only.
        lower_bound: the least log decay per token, in [-5, 0). A smaller one that is given counts as the bound. Default
            None: unbounded.

    Returns:
        ``o [1, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import prefill_kda
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(1, 90, heads, 32) for heads in (2, 2, 4))  # prompts of 70 and 20 tokens
        >>> g, beta = -torch.rand(1, 90, 4, 32), torch.rand(1, 90, 4)
        >>> bounds, slots = torch.tensor([0, 70, 90]), torch.tensor([5, 0])
        >>> o = prefill_kda(
        ...     q, k, v, g, beta, pool, bounds, slots, slots,
        ...     has_initial_state=torch.tensor([False, False]), use_qk_l2norm_in_kernel=True, state_v_first=True,
        ... )
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([1, 90, 4, 32]), [0, 5])

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    inputs = Inputs(q, k, v, g, beta, None, None, A_log, dt_bias, cu_seqlens)
    checkpoints = (checkpoint_indices, checkpoint_offsets)
    slots = Slots(state_pool, read_indices, write_indices, None, None, has_initial_state, *checkpoints, out)
    around, layer = around_of("prefill_kda", convolution, output_norm)
    options = {
        "op": "prefill_kda", "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "scale": scale,
        "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first, "batch_invariant": batch_invariant,
        "pools": (*layer, null_slot, checkpoint_every, max_prompts),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)
