"""Calls on one rank's part of a row that is split over ranks: what ops need from a ``cp_context``.

`flash_delta.parallel` uses the ops. The ops do not import it, and know nothing about processes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain, Explanation
from flash_delta.ops._check.options import as_bool, refuse
from flash_delta.ops._check.rule import check_shape, refuse_unless_none
from flash_delta.ops._function import problem_of, run
from flash_delta.problem import Inputs


@runtime_checkable
class Context(Protocol):
    """A ``cp_context`` as ops see it: this rank's tokens and sequences, and a method that composes runs of an op."""

    tokens: int
    bounds: tuple[int, ...] | None  # of its rows; None: only the device knows

    def local_bounds(self, device: torch.device) -> Tensor: ...

    def times(self, n: int) -> "Context": ...

    def delta_rule(
        self, run: Callable[[Inputs, Sequence[int] | None], tuple[Tensor, Tensor]], x: Inputs
    ) -> tuple[Tensor, Tensor]: ...


def run_chunks(
    context: Context | None,
    x: Inputs,
    options: dict[str, Any],
    bounds: Tensor | Sequence[int] | None,
    *,
    output_final_state: bool,
    backend: str | Explain | None,
) -> tuple[Tensor, Tensor | None] | Explanation:
    """``(o, final_state)`` of a chunk op, for all sequences, or with a ``context`` for this rank's part of a row. The
    context then composes runs of the op on this rank."""
    if context is None:
        return run(x, options, bounds, output_final_state=output_final_state, backend=backend)
    op = options["op"]
    if not isinstance(context, Context):
        refuse(op, "cp_context", "a flash_delta.parallel.ContextParallel", type(context).__name__)
    for name, given in (("cu_seqlens", x.cu_seqlens), ("cu_seqlens_cpu", bounds)):
        refuse_unless_none(op, name, given, "cp_context has the bounds")
    if options.get("keep_states"):
        refuse(op, "return_intermediate_states", "False with cp_context", "True")
    if as_bool(op, "batch_invariant", options["batch_invariant"]):
        refuse(op, "batch_invariant", "False with cp_context: ranks split a sequence where others end", "True")
    check_shape(op, "q", x.q, 1, context.tokens, "H", "K")
    x = x._replace(cu_seqlens=context.local_bounds(x.q.device))
    problem = problem_of(x, options, context.bounds)
    if isinstance(backend, Explain):
        return backend.of(problem, x)
    if options["state_v_first"] and x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.mT.contiguous())
    plain = options | {"state_v_first": False}

    def run_here(x: Inputs, bounds: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        return run(x, plain, bounds, output_final_state=True, backend=backend)

    o, final_state = context.delta_rule(run_here, x)
    final_state = final_state.mT.contiguous() if options["state_v_first"] else final_state
    return o, final_state if as_bool(op, "output_final_state", output_final_state) else None
