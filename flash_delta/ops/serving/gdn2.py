"""Serving GDN-2: the calls of Kimi Delta Attention, with an erase gate b and a write gate w in place of beta."""

from torch import Tensor

from flash_delta.ops.serving._run import run
from flash_delta.ops.serving.around import Convolution, OutputNorm, around_of
from flash_delta.ops.serving.ring import Ring, ring_of
from flash_delta.problem import Inputs, Slots


def decode_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
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
    r"""Decode, or verify drafts, with GDN-2.

    .. math::
        \tilde S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1}, \qquad
        S_t = \tilde S_t + k_t \left(w_t \odot v_t - \tilde S_t^\top (b_t \odot k_t)\right)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    The pool, its indices and rounding work as in :func:`flash_delta.decode_gated_delta_rule`. The convolution covers q,
    k and v. Arguments that are not listed here mean the same as in :func:`flash_delta.decode_kda`.

    Args:
        b: erase gate ``[B, T, HV, K]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        w: write gate ``[B, T, HV, V]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        use_beta_sigmoid_in_kernel: apply the sigmoid to b and to w. Default False.
        allow_neg_eigval: True doubles the sigmoid of b, and not that of w. Default None.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import decode_gdn2
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(3, 1, heads, 32) for heads in (2, 2, 4))  # one token for each of 3 sequences
        >>> g, b, w = -torch.rand(3, 1, 4, 32), torch.rand(3, 1, 4, 32), torch.rand(3, 1, 4, 32)
        >>> slots = torch.tensor([5, 0, 2])  # where their states are
        >>> o = decode_gdn2(q, k, v, g, b, w, pool, slots, slots, state_v_first=True)
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([3, 1, 4, 32]), [0, 2, 5])

    Source: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, as fla 0.6.0 defines it.
    """
    inputs = Inputs(q, k, v, g, None, None, None, A_log, dt_bias, cu_seqlens, b, w)
    slots = Slots(  # by name it takes longer
        state_pool, read_indices, write_indices, num_accepted_tokens, parent_idx, None, None, None, out, write_pool,
        *ring_of("decode_gdn2", ring),
    )  # fmt: skip
    around, layer = around_of("decode_gdn2", convolution, output_norm)
    options = {
        "op": "decode_gdn2", "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed",
        "channel_strength": True, "scale": scale, "recurrent": True, "l2norm": use_qk_l2norm_in_kernel,
        "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
        "pools": (*layer, null_slot, None, None),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)


def prefill_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
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
    r"""Continue sequences from their states in a pool, with GDN-2.

    .. math::
        \tilde S_t = \mathrm{diag}(e^{g_t}) \, S_{t-1}, \qquad
        S_t = \tilde S_t + k_t \left(w_t \odot v_t - \tilde S_t^\top (b_t \odot k_t)\right)^\top, \qquad
        o_t = \text{scale} \cdot S_t^\top q_t

    The pool, its indices and bits are as in :func:`flash_delta.prefill_gated_delta_rule`. Arguments that are not listed
    here mean the same as in :func:`flash_delta.prefill_kda`.

    Args:
        b: erase gate ``[1, T, HV, K]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        w: write gate ``[1, T, HV, V]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        use_beta_sigmoid_in_kernel: apply the sigmoid to b and to w. Default False.
        allow_neg_eigval: True doubles the sigmoid of b, and not that of w. Default None.

    Returns:
        ``o [1, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import prefill_gdn2
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, k, v = (torch.randn(1, 90, heads, 32) for heads in (2, 2, 4))  # prompts of 70 and 20 tokens
        >>> g, b, w = -torch.rand(1, 90, 4, 32), torch.rand(1, 90, 4, 32), torch.rand(1, 90, 4, 32)
        >>> bounds, slots = torch.tensor([0, 70, 90]), torch.tensor([5, 0])
        >>> o = prefill_gdn2(
        ...     q, k, v, g, b, w, pool, bounds, slots, slots,
        ...     has_initial_state=torch.tensor([False, False]), use_qk_l2norm_in_kernel=True, state_v_first=True,
        ... )
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([1, 90, 4, 32]), [0, 5])

    Source: Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, as fla 0.6.0 defines it.
    """
    inputs = Inputs(q, k, v, g, None, None, None, A_log, dt_bias, cu_seqlens, b, w)
    checkpoints = (checkpoint_indices, checkpoint_offsets)
    slots = Slots(state_pool, read_indices, write_indices, None, None, has_initial_state, *checkpoints, out)
    around, layer = around_of("prefill_gdn2", convolution, output_norm)
    options = {
        "op": "prefill_gdn2", "gate": ("channel", use_gate_in_kernel, lower_bound), "erase": "decayed",
        "channel_strength": True, "scale": scale, "l2norm": use_qk_l2norm_in_kernel,
        "raw_beta": use_beta_sigmoid_in_kernel, "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
        "batch_invariant": batch_invariant, "pools": (*layer, null_slot, checkpoint_every, max_prompts),
    }  # fmt: skip
    return run(inputs, slots, options, backend, around)
