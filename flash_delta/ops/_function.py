"""The autograd Function of all ops of the family. While torch.compile traces, ops call an operator instead."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_delta.backend import plans_on_host
from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend, wished
from flash_delta.ops._check.options import Options, as_bool, cast
from flash_delta.ops._check.rule import DTYPES, describe, read_lengths
from flash_delta.ops._execute import backward, forward
from flash_delta.ops._known_calls import look_at, recall
from flash_delta.ops._operators.rule import call_operator
from flash_delta.ops._transforms import differentiable_once, has_tangents, is_traced
from flash_delta.problem import Inputs, KnownCall, Problem, sharing

Bounds = Tensor | Sequence[int] | None  # on the host


def run(
    x: Inputs, options: dict[str, Any], bounds: Bounds, *, output_final_state: bool, backend: str | Explain | None
) -> tuple[Tensor, ...] | Explanation:
    """``(o, final_state)``, and the chunk states after them if the problem keeps them.

    On a GPU a call is checked once (`look_at`). ``options`` is a dictionary of fields of `Options`, because making an
    `Options` takes 1 us.
    """
    given = (backend, bounds is None, *options.values())
    known = recall(given, x)
    if known is None:
        if isinstance(backend, Explain):
            return backend.of(problem_of(x, options, bounds), x)
        if is_traced(x.q):
            return _run_traced(x, options, bounds, output_final_state, backend)
        if has_tangents() or not getattr(x.q, "is_cuda", False):
            known = _look(given, options, x, bounds)
        else:
            known = look_at(partial(_look, bounds=bounds), torch.is_grad_enabled(), given, options, x)
    problem = known.problem
    if bounds is not None or problem.lengths is None:
        problem = plan_lengths(known, x, bounds)
    if known.needs_grad:
        o, final_state, states = DeltaRule.apply(problem, known, *x)
    else:  # without autograd, which would take a good part of a decoding step
        o, final_state, _, states, _ = forward(problem, known, x)
    return _results(problem, o, final_state, states, output_final_state)


def plan_lengths(known: KnownCall, x: Inputs, bounds: Bounds) -> Problem:
    """The known problem, with the lengths of this call if the host has them or its backend needs them there."""
    problem = known.problem
    if bounds is not None:  # a known call does not remember these values
        return _with_lengths(problem, read_lengths(problem.op, x, bounds))
    if problem.lengths is None and plans_on_host(known.backend):
        return _with_lengths(problem, read_lengths(problem.op, x, None, wait=True))
    return problem


def _run_traced(
    x: Inputs, options: dict[str, Any], bounds: Bounds, output_final_state: bool, backend: str | None
) -> tuple[Tensor, ...]:
    """Calls the operator. Only traced calls do so, since others would pay for the dispatcher."""
    problem = problem_of(x, options, bounds)
    o, final_state, states = call_operator(problem, x, wished(backend))
    return _results(problem, o, final_state, states, output_final_state)


def _results(
    problem: Problem, o: Tensor, final_state: Tensor, states: Tensor | None, output_final_state: bool
) -> tuple[Tensor, ...]:
    result = (o, final_state if as_bool(problem.op, "output_final_state", output_final_state) else None)
    return (*result, states) if problem.keep_states else result


def run_tokens(
    x: Inputs, options: dict[str, Any], bounds: Bounds, *, output_final_state: bool, backend: str | Explain | None
) -> tuple[Tensor, ...] | Explanation:
    """`run` of a recurrent op. If q, k and v have different dtypes, it computes with float32 copies (float64 if one of
    them is float64), and ``o`` has v's dtype. A known decoding step is launched directly (`KnownCall.again`)."""
    known = recall((backend, True, *options.values()), x) if bounds is None and not torch.is_grad_enabled() else None
    found = None if known is None or known.again is None else known.again(known.problem, x, known)
    if found is not None:
        return found[0], found[1] if as_bool(options["op"], "output_final_state", output_final_state) else None
    q, k, v = getattr(x.q, "dtype", None), getattr(x.k, "dtype", None), getattr(x.v, "dtype", None)
    if q is k is v or not {q, k, v} <= {*DTYPES}:  # the checks will name the argument that is no tensor
        return run(x, options, bounds, output_final_state=output_final_state, backend=backend)
    wide = torch.float64 if torch.float64 in (q, k, v) else torch.float32
    x = x._replace(q=x.q.to(wide), k=x.k.to(wide), v=x.v.to(wide))
    found = run(x, options, bounds, output_final_state=output_final_state, backend=backend)
    return found if isinstance(found, Explanation) else (found[0].to(v), found[1])


def gradients(x: Inputs, options: dict[str, Any], do: Tensor | None, dfinal: Tensor | None) -> Inputs:
    """The gradients of a call, for callers that have only its tensors. It computes again what `run` saves."""
    given = (gradients, *options.values())
    known = look_at(_look_back, False, given, options, x)
    problem = known.problem
    if x.cu_seqlens is not None:
        lengths = read_lengths(problem.op, x, None, wait=plans_on_host(known.backend))
        problem = _with_lengths(problem, lengths)
    out = forward(problem, known, x)
    return backward(problem, known, x, (*out.saved, *out.planned), do, dfinal)


def _look_back(_: tuple[Any, ...], options: dict[str, Any], x: Inputs) -> KnownCall:
    problem = problem_of(x, options, None)._replace(needs_grad=True)
    return KnownCall(problem, load_backend(choose_backend(problem, None)), needs_grad=True)


def _with_lengths(problem: Problem, lengths: tuple[int, ...] | None) -> Problem:
    """The problem with these lengths. Makes a new problem only if they differ, since comparing is faster."""
    return problem if problem.lengths == lengths else problem._replace(lengths=lengths)


def problem_of(x: Inputs, options: dict[str, Any], bounds: Bounds) -> Problem:
    return describe(x, cast(Options(**options)), bounds)


def _look(given: tuple[Any, ...], options: dict[str, Any], x: Inputs, bounds: Bounds = None) -> KnownCall:
    """The known call. ``given`` begins with the backend that is asked for."""
    problem = sharing(problem_of(x, options, bounds))
    return KnownCall(problem, load_backend(choose_backend(problem, given[0])), problem.needs_grad)


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Problem, known: KnownCall, *tensors: Tensor | None):
        out = forward(problem, known, Inputs(*tensors))
        ctx.op, ctx.problem, ctx.known = problem.op, problem, known
        ctx.save_for_backward(*tensors, *out.saved, *out.planned)
        ctx.set_materialize_grads(False)
        if out.states is not None:
            ctx.mark_non_differentiable(out.states)
        return out.o, out.final_state, out.states

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], do: Tensor | None, dfinal: Tensor | None, _):
        count = len(Inputs._fields)
        inputs, saved = Inputs(*tensors[:count]), tensors[count:]
        return None, None, *backward(ctx.problem, ctx.known, inputs, saved, do, dfinal)
