"""Gated DeltaProduct on pools of states: calls of the gated delta rule with n tokens for each."""

from torch import Tensor

from flash_delta.ops._check.options import as_size, refuse
from flash_delta.ops._check.rule import check_shape
from flash_delta.ops._check.serving import MOST_TOKENS
from flash_delta.ops._check.updates import by_tokens, by_updates
from flash_delta.ops.serving._run import run
from flash_delta.ops.serving.around import NOTHING
from flash_delta.problem import Inputs, Slots


def decode_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    state_pool: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    null_slot: int | None = None,
    *,
    state_v_first: bool,
    backend: str | None = None,
) -> Tensor:
    r"""Decode with Gated DeltaProduct: n updates of the state per token.

    .. math::
        S_{t,0} = e^{g_t} S_{t-1}, \qquad
        S_{t,j} = S_{t,j-1} + \beta_{tj} k_{tj} (v_{tj} - S_{t,j-1}^\top k_{tj})^\top \quad (j = 1 \ldots n), \qquad
        o_t = \text{scale} \cdot S_{t,n}^\top q_t

    in float32. S is rounded to the dtype of the pool after every update. The pool and its indices work as in
    :func:`decode_gated_delta_rule`, where arguments that are not listed here mean the same. A row writes no other state
    than that after its last token, so drafts cannot be accepted in part. Convolutions come before the call.

    Args:
        q: queries ``[B, T, H, K]``, float16, bfloat16 or float32; n T is at most 16.
        k: keys ``[B, n T, H, K]``, dtype of q. The n updates of token t are rows ``n t`` to ``n t + n - 1``.
        v: values ``[B, n T, HV, V]``, dtype of q; HV a multiple of H.
        g: log decay in nats ``[B, T, HV]``, at most 0, any float dtype; one per token. None: no decay. It is the decay
            itself: apply :func:`flash_delta.fused_gdn_gate` to a raw activation.
        beta: write strength ``[B, n T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        num_householder: the number n of updates per token, at least 1.
        read_indices: the slots of the rows' states ``[B]``, int32 or int64.
        write_indices: where the states after the last token go ``[B]``. Default None: nowhere.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import decode_gated_delta_product
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, g = torch.randn(3, 1, 2, 32), -torch.rand(3, 1, 4)  # one token for each of 3 sequences
        >>> k, v, beta = torch.randn(3, 2, 2, 32), torch.randn(3, 2, 4, 32), torch.rand(3, 2, 4)  # its two updates
        >>> slots = torch.tensor([5, 0, 2])  # where their states are
        >>> o = decode_gated_delta_product(q, k, v, g, beta, 2, pool, slots, slots, state_v_first=True)
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([3, 1, 4, 32]), [0, 2, 5])

    Source: Siems et al., DeltaProduct, arXiv:2502.10297.
    """
    op = "decode_gated_delta_product"
    n = as_size(op, "num_householder", num_householder)
    inputs, _, _ = by_updates(op, n, Inputs(q, k, v, g, beta), None)
    if inputs.q.shape[1] > MOST_TOKENS:
        refuse(op, "q", f"1 to {MOST_TOKENS // n} tokens (axis 1) of {n} updates", q.shape[1])
    if write_indices is not None:
        check_shape(op, "write_indices", write_indices, q.shape[0])
    return _run(op, n, inputs, Slots(state_pool, read_indices, write_indices), null_slot, backend, {
        "scale": scale, "recurrent": True, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first,
    })  # fmt: skip


def prefill_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    read_indices: Tensor,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool | None = None,
    batch_invariant: bool = False,
    null_slot: int | None = None,
    *,
    state_v_first: bool,
    backend: str | None = None,
) -> Tensor:
    r"""Continue N sequences of any lengths with Gated DeltaProduct, from their states in a pool.

    .. math::
        S_{t,0} = e^{g_t} S_{t-1}, \qquad
        S_{t,j} = S_{t,j-1} + \beta_{tj} k_{tj} (v_{tj} - S_{t,j-1}^\top k_{tj})^\top \quad (j = 1 \ldots n), \qquad
        o_t = \text{scale} \cdot S_{t,n}^\top q_t

    The pool and its indices work as in :func:`prefill_gated_delta_rule`, where arguments that are not listed here mean
    the same. There are no checkpoints, and convolutions come before the call.

    Args:
        q: queries ``[1, T, H, K]``; float16, bfloat16 or float32.
        k: keys ``[1, n T, H, K]``, dtype of q. The n updates of token t are rows ``n t`` to ``n t + n - 1``.
        v: values ``[1, n T, HV, V]``, dtype of q; HV a multiple of H.
        g: log decay in nats ``[1, T, HV]``, at most 0, any float dtype; one per token. None: no decay.
        beta: write strength ``[1, n T, HV]``, any float dtype; with ``use_beta_sigmoid_in_kernel`` its logit.
        num_householder: the number n of updates per token, at least 1.
        cu_seqlens: the bounds of the sequences ``[N + 1]``, int32 or int64. They count tokens.

    Returns:
        ``o [1, T, HV, V]`` in q's dtype, without gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.

    Example:
        >>> import torch
        >>> from flash_delta import prefill_gated_delta_product
        >>> pool = torch.zeros(8, 4, 32, 32)  # 8 slots of 4 heads' states
        >>> q, g = torch.randn(1, 90, 2, 32), -torch.rand(1, 90, 4)  # prompts of 70 and 20 tokens
        >>> k, v, beta = torch.randn(1, 180, 2, 32), torch.randn(1, 180, 4, 32), torch.rand(1, 180, 4)
        >>> bounds, slots = torch.tensor([0, 70, 90]), torch.tensor([5, 0])
        >>> o = prefill_gated_delta_product(
        ...     q, k, v, g, beta, 2, pool, bounds, slots, slots, use_qk_l2norm_in_kernel=True, state_v_first=True
        ... )
        >>> o.shape, [n for n in range(8) if pool[n].any()]
        (torch.Size([1, 90, 4, 32]), [0, 5])

    Source: Siems et al., DeltaProduct, arXiv:2502.10297.
    """
    op = "prefill_gated_delta_product"
    n = as_size(op, "num_householder", num_householder)
    inputs, _, _ = by_updates(op, n, Inputs(q, k, v, g, beta, cu_seqlens=cu_seqlens), None)
    slots = Slots(state_pool, read_indices, write_indices, has_initial_state=has_initial_state)
    return _run(op, n, inputs, slots, null_slot, backend, {
        "scale": scale, "l2norm": use_qk_l2norm_in_kernel, "raw_beta": use_beta_sigmoid_in_kernel,
        "neg_eigval": allow_neg_eigval, "state_v_first": state_v_first, "batch_invariant": batch_invariant,
    })  # fmt: skip


def _run(op: str, n: int, x: Inputs, s: Slots, null_slot: int | None, backend: str | None, options: dict) -> Tensor:
    if x.g is None:  # the kernels need a decay; a log decay of 0 is exact
        x = x._replace(g=x.v.new_zeros(x.v.shape[:3]))
    options = {"op": op, "gate": ("scalar", False, None), "erase": "decayed", **options}
    options["pools"] = (None, None, False, null_slot, None, None)
    return by_tokens(n, run(x, s, options, backend, NOTHING))
