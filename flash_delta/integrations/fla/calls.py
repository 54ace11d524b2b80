"""The ops of fla.ops. Some of them have other arguments or defaults than ours, or another name."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from torch import Tensor

from flash_delta import ops
from flash_delta.ops._check.options import refuse
from flash_delta.ops._check.rule import state_layout

NAME = "allow_neg_eigval"
Op = TypeVar("Op", bound=Callable[..., Any])


def as_in_fla(op: Op) -> Op:
    """The op, for which False means None. False is fla's default, so it says nothing about a beta that is given."""
    parameters = [*signature(op).parameters.values()]
    place = [p.name for p in parameters].index(NAME)
    parameters[place] = parameters[place].replace(default=False)

    @wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place] is False:
            args = (*args[:place], None, *args[place + 1 :])
        if kwargs.get(NAME) is False:
            kwargs[NAME] = None
        return op(*args, **kwargs)

    call.__signature__ = signature(op).replace(parameters=parameters)
    return cast(Op, call)


chunk_gdn = chunk_gated_delta_rule = as_in_fla(ops.chunk_gated_delta_rule)
fused_recurrent_gdn = fused_recurrent_gated_delta_rule = as_in_fla(ops.fused_recurrent_gated_delta_rule)
chunk_kda = as_in_fla(ops.chunk_kda)
fused_recurrent_kda = as_in_fla(ops.fused_recurrent_kda)
fused_chunk_delta_rule = chunk_delta_rule = ops.chunk_delta_rule
chunk_comba = ops.chunk_comba
chunk_gated_delta_product = ops.chunk_gated_delta_product
chunk_gdn2, fused_recurrent_gdn2 = ops.chunk_gdn2, ops.fused_recurrent_gdn2
chunk_simple_gla = ops.chunk_simple_gla


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule token by token: :func:`flash_delta.fused_recurrent_gated_delta_rule` without a decay."""
    g = v.new_zeros(v.shape[:3])  # the decoding kernel needs a decay; a log decay of 0 is exact
    norm = use_qk_l2norm_in_kernel
    return ops.fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state, norm, cu_seqlens=cu_seqlens
    )


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_comba`, which is the same function; p stands before v."""
    return ops.chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla`."""
    return ops.chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first=False, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`flash_delta.chunk_simple_gla`; ``reverse`` has to be False."""
    op = "fused_recurrent_simple_gla"
    if reverse:
        refuse(op, "reverse", "False (flip q, k, v and g along the tokens, then o)", reverse)
    layout = state_layout(op, state_v_first, transpose_state_layout)
    return ops.chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, layout, cu_seqlens)


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """:func:`flash_delta.chunk_simple_gla`, with None for the attention weights, which are not computed."""
    if output_attentions:
        refuse("parallel_simple_gla", "output_attentions", "False (the weights are never computed)", output_attentions)
    o, _ = ops.chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return o, None
