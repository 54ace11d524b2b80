"""A few new tokens for sequences whose states lie in the slots of a pool, in place."""

from torch import Tensor

from flash_delta.ops.serving._run import run
from flash_delta.ops.serving.around import Convolution, OutputNorm, around_of
from flash_delta.ops.serving.ring import Ring, ring_of
from flash_delta.problem import Inputs, Slots


def decode_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    parent_idx: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    convolution: Convolution | None = None,
    output_norm: OutputNorm | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    write_pool: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool,
    ring: Ring | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Decode, or verify drafts: T new tokens for each of B sequences whose states lie in a pool. For inference only.

    .. math::
        S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^\top k_t)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    in float32. S is rounded to the dtype of the pool after every token. So one call with T tokens gives the same bits
    as T calls with one token, where each call reads the state that the call before it wrote. No row changes a bit of
    another row.

    Row b reads its state from slot ``read_indices[b]``. With ``num_accepted_tokens`` it reads from slot
    ``read_indices[b, num_accepted_tokens[b] - 1]``. This continues a draft of an earlier call that was accepted in
    part. A server can give one table [B, T] of slots to every call, as ``read_indices`` and as ``write_indices``. Each
    call then continues from the last token that was accepted.

    Kernels check every index. The host reads none, so a call can be captured in a CUDA graph. An index below 0, or of
    ``slots`` or more, is padding. So is a count outside of 1 .. W. No memory is touched for padding. A row without a
    slot to read gives zeros and writes nothing. If a token has no slot to write, its row gives zeros from this token
    on. A slot that is written must not be used by another row of the call, nor for another token of its row. On a CPU
    such a call is refused. On a GPU the results of these rows are undefined.

    Args:
        q: queries ``[B, T, H, K]``, T from 1 to 16; float16, bfloat16 or float32. q, k, v, g and beta may have any
            strides (slices of a fused projection).
        k: keys ``[B, T, H, K]``, dtype of q.
        v: values ``[B, T, HV, V]``, dtype of q; HV a multiple of H, value head h uses key head ``h // (HV // H)``.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw activation.
        beta: write strength ``[B, T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        state_pool: ``[slots, HV, V, K]`` if ``state_v_first``, else ``[slots, HV, K, V]``; float32, bfloat16 or
            float16, any strides (slots may be padded); written in place.
        read_indices: the slots of the rows' states, ``[B]``, or ``[B, W]`` with ``num_accepted_tokens``. All indices
            are int32 or int64.
        write_indices: where states go. ``[B]``: the state after the last token. ``[B, T]``: the states after every
            token. Default None: nowhere. A row may write the slot that it reads.
        num_accepted_tokens: ``[B]``, from 1 to W: how many tokens of a row's previous draft were accepted. Default
            None.
        parent_idx: for a draft tree, ``[B, T]``: token t continues from the state after token ``parent_idx[b, t]``,
            which must be before t. -1 means the state that the row reads. Any other index is padding. The first token
            always continues from the state that the row reads, and its index is ignored. It needs
            ``write_indices [B, T]``. Default None: each token continues from the one before it.
        scale: factor on the output. Default ``K ** -0.5``.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms (eps 1e-6 inside the root). Default False.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``, in float32. Default False.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it.
        dt_bias: ``[HV]`` or None; for ``use_gate_in_kernel`` only.
        use_beta_sigmoid_in_kernel: apply the sigmoid to beta. Default False.
        allow_neg_eigval: True doubles the sigmoid, so beta reaches 2; None means False. If beta is given, it may be
            up to 2, and False states that it is at most 1 (docs/guide/backends.md, "Beta up to 2"). Default None.
        convolution: a short convolution with SiLU, applied to q, k and v first
            (:class:`flash_delta.ops.serving.Convolution`). With ``output_norm`` the call does everything that a layer
            does between its projections. Default None.
        output_norm: a gated norm, applied to o last (:class:`flash_delta.ops.serving.OutputNorm`). Default None.
        null_slot: an index that also counts as padding, as if it were out of range. vLLM pads with slot 0. Default
            None: only indices out of range are padding.
        out: the tensor that o is written to, ``[B, T, HV, V]`` in q's dtype, contiguous. Its address must be a multiple
            of 16 bytes. It must not share memory with another argument, which is checked for the first call of its
            kind. Default None: new memory.
        write_pool: a second pool, which states are written to; ``state_pool`` is then only read. float32, bfloat16 or
            float16, any strides. Either it is ``[slots', HV, V, K]``, and ``write_indices`` name its slots. Or it is
            ``[rows, S, HV, V, K]``, S at least T, and ``write_indices [B]`` name its rows: the state after token t goes
            to ``[row, t]``. Without ``state_v_first`` its last axes are K, V. Between tokens states are rounded to its
            dtype. A draft tree continues from the states in it. ``null_slot`` is padding in it, too. Default None:
            ``state_pool``.
        cu_seqlens: bounds of rows that differ in length, ``[B + 1]`` on the device, int32 or int64. Tokens are then
            packed: q is ``[1, total, H, K]``. The other tensors of tokens, o and ``out`` are packed in the same way.
            Row b has tokens ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``, or none. T is the number of columns of
            ``write_indices [B, T]`` or ``parent_idx [B, T]``. Without these tables T is 16, or S of a ``write_pool`` if
            S is less. A row of more than T tokens is padding. A row gives the same bits as in a call with T tokens in
            every row. Tokens after the last bound give zeros. Default None: every row has T tokens.
        ring: records instead of states (:class:`flash_delta.ops.serving.Ring`). The call writes the records of its
            tokens. If the ring has ``read`` and ``counts``, it first applies the records that they name, and
            ``write_indices [B]`` are for the states after those. Without them ``write_indices`` is None, and no state
            changes. ``read_indices`` is ``[B]``. ``num_accepted_tokens`` only says where windows of a ``convolution``
            start, which has to be rolling. ``parent_idx`` and ``write_pool`` are refused. Default None.
        state_v_first: the layout of ``state_pool`` and ``write_pool``. It has no default: with K = V no shape would
            show a mistake.
        backend: the backend that runs the call, or refuses it. Default None: the one that ``FLASH_DELTA_BACKEND``
            names, or else the first that can run the call.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, without gradient; ``out`` if it is given.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import decode_gated_delta_rule
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(3, 1, heads, 32) for heads in (2, 2, 4))  # one token for each of 3 sequences
        >>> g, beta = -torch.rand(3, 1, 4), torch.rand(3, 1, 4)
        >>> slots = torch.tensor([5, 0, 2])  # where their states are
        >>> o = decode_gated_delta_rule(q, k, v, g, beta, pool, slots, slots, state_v_first=True)
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([3, 1, 4, 32]), [0, 2, 5])

    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464; drafts verified as in Leviathan, Kalman,
    Matias, Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192.
    """
    inputs = Inputs(q, k, v, g, beta, None, None, A_log, dt_bias, cu_seqlens)
    slots = Slots(  # by name it takes longer
        state_pool, read_indices, write_indices, num_accepted_tokens, parent_idx, None, None, None, out, write_pool,
        *ring_of("decode_gated_delta_rule", ring),
    )  # fmt: skip
    around, layer = around_of("decode_gated_delta_rule", convolution, output_norm)
    options = {
        "op": "decode_gated_delta_rule", "gate": ("scalar", use_gate_in_kernel, None), "erase": "decayed",
        "scale": scale, "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "pools": (*layer, null_slot, None, None),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)


def decode_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    parent_idx: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    convolution: Convolution | None = None,
    output_norm: OutputNorm | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
    write_pool: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool,
    ring: Ring | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Decode, or verify drafts, with Kimi Delta Attention: one decay per key channel.

    .. math::
        S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) \, S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    The pool, its indices and rounding work as in :func:`decode_gated_delta_rule`. Arguments that are not listed here
    also mean the same as there.

    Args:
        g: log decay in nats ``[B, T, HV, K]``, at most 0, any float dtype; with ``use_gate_in_kernel`` the raw
            activation.
        use_gate_in_kernel: ``g`` becomes ``-exp(A_log) * softplus(g + dt_bias)``; with ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, where A_log may be None. In float32. Default False.
        A_log: ``[HV]``; for ``use_gate_in_kernel`` only, which needs it unless there is a ``lower_bound``.
        dt_bias: ``[HV * K]`` or None; for ``use_gate_in_kernel`` only.
        lower_bound: the least log decay per token, in [-5, 0). A smaller one that is given counts as the bound. Default
            None: unbounded.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import decode_kda
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(3, 1, heads, 32) for heads in (2, 2, 4))  # one token for each of 3 sequences
        >>> g, beta = -torch.rand(3, 1, 4, 32), torch.rand(3, 1, 4)
        >>> slots = torch.tensor([5, 0, 2])  # where their states are
        >>> o = decode_kda(q, k, v, g, beta, pool, slots, slots, state_v_first=True)
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([3, 1, 4, 32]), [0, 2, 5])

    Source: Kimi Team, Kimi Linear, arXiv:2510.26692.
    """
    inputs = Inputs(q, k, v, g, beta, None, None, A_log, dt_bias, cu_seqlens)
    slots = Slots(  # by name it takes longer
        state_pool, read_indices, write_indices, num_accepted_tokens, parent_idx, None, None, None, out, write_pool,
        *ring_of("decode_kda", ring),
    )  # fmt: skip
    around, layer = around_of("decode_kda", convolution, output_norm)
    options = {
        "op": "decode_kda", "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed", "scale": scale,
        "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "pools": (*layer, null_slot, None, None),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)
