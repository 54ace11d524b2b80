"""Calls with n updates of the state per token (`Problem.steps`), as calls of the delta rule on n times as many rows."""

from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import Explanation
from flash_delta.ops._check.rule import check_cu_seqlens, check_shape, read_lengths
from flash_delta.ops._context import Context, run_chunks
from flash_delta.ops._execute import interleaved, rows_of_queries
from flash_delta.ops._function import Bounds, run
from flash_delta.ops._transforms import is_traced
from flash_delta.problem import Inputs


def run_updates(
    n: int, x: Inputs, options: dict[str, Any], bounds: Bounds, context: Context | None, **how: Any
) -> tuple[Tensor, Tensor | None] | Explanation:
    """``(o, final_state)`` of a chunk op. Backends that can read q and g once per token (`_execute`). With a
    ``context``, which composes runs of the gated delta rule, q and g are interleaved here."""
    if context is not None:
        x, bounds, context = by_updates(options["op"], n, x, bounds, context)
        return by_tokens(n, run_chunks(context, x, options, bounds, **how))
    x, bounds, _ = _in_rows(options["op"], n, x, bounds)
    return run(x, options | {"steps": n}, bounds, **how)


def by_updates(
    op: str, n: int, x: Inputs, bounds: Bounds, context: Context | None = None
) -> tuple[Inputs, Bounds, Context | None]:
    """The call as the delta rule on n T tokens."""
    x, bounds, context = _in_rows(op, n, x, bounds, context)
    return x if n == 1 else interleaved(n, x), bounds, context


def by_tokens(n: int, found: Any) -> Any:
    """o, or ``(o, final_state)``, with the rows of o that a query reads, in a copy, so that the others are freed."""
    if n == 1 or isinstance(found, Explanation):
        return found
    if isinstance(found, tuple):
        o, final_state = found
        return by_tokens(n, o), final_state
    return rows_of_queries(n, found).contiguous()


def _in_rows(
    op: str, n: int, x: Inputs, bounds: Bounds, context: Context | None = None
) -> tuple[Inputs, Bounds, Context | None]:
    """The inputs, with bounds that count rows of k, after checks of all that the caller counts in tokens."""
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
        read_lengths(op, x._replace(k=x.q), bounds)
    if bounds is not None:  # a default device shall not move them
        bounds = n * torch.as_tensor(bounds, device=getattr(bounds, "device", "cpu"))
    return x._replace(cu_seqlens=None if x.cu_seqlens is None else n * x.cu_seqlens), bounds, context
