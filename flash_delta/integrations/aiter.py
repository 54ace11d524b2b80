"""Two functions of ``aiter.ops.triton.gated_delta_net``, with aiter's arguments in aiter's order.

To use them in code that was written for aiter, change the import lines. Here they also have gradients.

Example:
    >>> import torch
    >>> from flash_delta.integrations.aiter import chunk_gated_delta_rule_opt_vk
    >>> q, k = torch.randn(2, 1, 100, 2, 16)
    >>> v, g, beta = torch.randn(1, 100, 4, 32), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
    >>> o, state = chunk_gated_delta_rule_opt_vk(q, k, v, None, g, beta, output_final_state=True)
    >>> state.shape  # aiter's layout [N, HV, V, K]
    torch.Size([1, 4, 32, 16])
"""

import torch
from torch import Tensor

from flash_delta.ops import chunk_gated_delta_rule
from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import check_kind, check_shape, refuse_unless_none

__all__ = ["chunk_gated_delta_rule_opt", "chunk_gated_delta_rule_opt_vk"]


def chunk_gated_delta_rule_opt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_gated_delta_rule`, where ``cu_seqlens`` is the tenth argument."""
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
    return chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, **options)


def chunk_gated_delta_rule_opt_vk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    use_chunk_hip: bool = False,
    use_chunk_flydsl: bool = False,
    state_dtype: torch.dtype | None = None,
    use_exp2: bool = True,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
    initial_state_indices: None = None,
    return_h: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_gated_delta_rule` with ``state_v_first=True``: states are [N, HV, V, K].

    Args:
        q: as in the op; so are k, v, g, beta, scale, output_final_state and use_qk_l2norm_in_kernel.
        o: a tensor that gets the output, and is returned. It gets no gradient.
        initial_state: [N, HV, V, K].
        cu_seqlens: the bounds [num_decodes + N + 1]. Those of the first ``num_decodes`` sequences are left out, and
            ``num_decode_tokens`` is subtracted from the others.
        use_chunk_hip: changes nothing, as do use_chunk_flydsl and use_exp2, which choose among aiter's kernels.
        state_dtype: the dtype of the final state. Default None: the op's.
        num_decodes: sequences that are in cu_seqlens and not in the other tensors.
        num_decode_tokens: the tokens of these sequences.
        initial_state_indices: has to be None. :func:`flash_delta.prefill_gated_delta_rule` works on a pool of states.
        return_h: has to be False. ``prefill_gated_delta_rule`` writes states into its pool.

    Returns:
        ``(o, final_state)``; the state is None unless asked for.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    op = "chunk_gated_delta_rule_opt_vk"
    refuse_unless_none(op, "initial_state_indices", initial_state_indices, "prefill_gated_delta_rule takes a pool")
    if return_h:
        refuse(op, "return_h", "False (prefill_gated_delta_rule has checkpoint_indices)", return_h)
    if num_decodes or num_decode_tokens:
        check_shape(op, "cu_seqlens", cu_seqlens, "num_decodes + N + 1")
        cu_seqlens = cu_seqlens[num_decodes:] - num_decode_tokens
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens, "state_v_first": True}
    found, state = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, **options)
    if o is not None:
        check_shape(op, "o", o, *found.shape)
        check_kind(op, "o", o, found.device, (found.dtype,))
        found = o.copy_(found.detach())
    return found, state if state is None or state_dtype is None else state.to(state_dtype)
