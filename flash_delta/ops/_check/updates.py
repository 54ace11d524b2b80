"""Calls with n updates of the state per token, as calls of the delta rule on n times as many tokens."""

from typing import Any

import torch
from torch.nn import functional as F

from flash_delta.ops._backend import Explanation
from flash_delta.ops._check.rule import check_cu_seqlens, check_shape, read_lengths
from flash_delta.ops._context import Context
from flash_delta.ops._function import Bounds
from flash_delta.ops._transforms import is_traced
from flash_delta.problem import Inputs


def by_updates(
    op: str, n: int, x: Inputs, bounds: Bounds, context: Context | None = None
) -> tuple[Inputs, Bounds, Context | None]:
    """The call as the delta rule on n T tokens: q on the last update of a token, g on the first, zeros elsewhere."""
    counted: tuple[int | str, ...] = ("B", "T")
    if isinstance(context, Context):
        counted, context = (1, context.tokens), context.times(n)
    B, T, H, K = check_shape(op, "q", x.q, *counted, "H", "K")
    check_shape(op, "k", x.k, B, n * T, H, K)
    _, _, HV, _ = check_shape(op, "v", x.v, B, n * T, "HV", "V")
    if x.g is not None:
        check_shape(op, "g", x.g, B, T, HV)
    if x.cu_seqlens is not None:
        check_cu_seqlens(op, x.cu_seqlens, x.q, "q")
    if n == 1:
        return x, bounds, context
    if context is None and not is_traced(x.q):  # the error shall have the caller's bounds
        read_lengths(op, x, bounds)
    if bounds is not None:  # a default device shall not move them
        bounds = n * torch.as_tensor(bounds, device=getattr(bounds, "device", "cpu"))
    return (
        x._replace(
            q=F.pad(x.q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2),
            g=None if x.g is None else F.pad(x.g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2),
            cu_seqlens=None if x.cu_seqlens is None else n * x.cu_seqlens,
        ),
        bounds,
        context,
    )


def by_tokens(n: int, found: Any) -> Any:
    """o, or ``(o, final_state)``, with the rows of o that a query reads, in a copy, so that the others are freed."""
    if n == 1 or isinstance(found, Explanation):
        return found
    if isinstance(found, tuple):
        o, final_state = found
        return by_tokens(n, o), final_state
    return found[:, n - 1 :: n].contiguous()
