"""Runs a problem on its backend, without autocast."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots


def forward(problem: Problem, known: KnownCall, inputs: Inputs) -> Outputs:
    run = known.backend.step if problem.recurrent else known.backend.forward
    # Most calls are known by `steps` alone, and a known call has few calls of Python (tests/test_training_host.py).
    if problem.steps == 1 or takes_steps(known.backend, problem):
        return _in_own_precision(run, problem, inputs, known)
    if problem.gate.raw:  # a raw gate of 0 decays
        raise ValueError(f"{problem.op}: expected a backend that takes raw gates once per token, got one that does not")
    n, inputs = problem.steps, interleaved(problem.steps, inputs)
    out = _in_own_precision(run, problem._replace(steps=1), inputs, known)
    return out._replace(o=rows_of_queries(n, out.o).contiguous())  # a copy, so that the others are freed


def backward(
    problem: Problem,
    known: KnownCall,
    inputs: Inputs,
    saved: tuple[Tensor, ...],
    do: Tensor | None,
    dfinal: Tensor | None,
) -> Inputs:
    n, run = problem.steps, known.backend.backward
    do = inputs.v.new_zeros(*inputs.q.shape[:2], *inputs.v.shape[2:]) if do is None else do
    if problem.steps == 1 or takes_steps(known.backend, problem):
        return _in_own_precision(run, problem, inputs, saved, do, dfinal, known)
    inputs, do = interleaved(n, inputs), _apart(do, n - 1, 0)
    d = _in_own_precision(run, problem._replace(steps=1), inputs, saved, do, dfinal, known)
    return d._replace(q=rows_of_queries(n, d.q), g=None if d.g is None else d.g[:, ::n])


def takes_steps(backend: ModuleType, problem: Problem) -> bool:
    """Whether a backend reads q and g once per token, and not once per update of the state (`interleaved`)."""
    return problem.steps == 1 or (hasattr(backend, "takes_steps") and backend.takes_steps(problem))


def interleaved(n: int, x: Inputs) -> Inputs:
    """The inputs with a row of q and g for each of n updates per token: q on the last one, g on the first, else 0."""
    return x._replace(q=_apart(x.q, n - 1, 0), g=None if x.g is None else _apart(x.g, 0, n - 1))


def rows_of_queries(n: int, t: Tensor) -> Tensor:
    """The rows that have a query in `interleaved`."""
    return t[:, n - 1 :: n]


def _apart(t: Tensor, before: int, after: int) -> Tensor:
    """Puts so many rows of zeros before and after each row."""
    return F.pad(t.unsqueeze(2), (0, 0) * (t.dim() - 2) + (before, after)).flatten(1, 2)


def serve(problem: Problem, known: KnownCall, inputs: Inputs, slots: Slots, around: Around) -> Tensor:
    run = known.backend.decode if problem.recurrent else known.backend.prefill
    return _in_own_precision(run, problem, inputs, slots, around, known)


def _in_own_precision(run: Callable[..., Any], problem: Problem, inputs: Inputs, *more: Any) -> Any:
    """Runs a function of a backend without autocast, because backends choose their precision by themselves."""
    kind = "cuda" if inputs.q.is_cuda else problem.device.type  # `device.type` takes 0.2 us
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch raises an error for "meta"
        return run(problem, inputs, *more)
    with torch.autocast(kind, enabled=False):
        return run(problem, inputs, *more)
