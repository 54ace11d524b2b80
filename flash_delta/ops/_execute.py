"""A problem on its backend, in the precision of the backend's choice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_delta.problem import Around, Inputs, KnownCall, Outputs, Problem, Slots


def forward(problem: Problem, known: KnownCall, inputs: Inputs) -> Outputs:
    run = known.backend.step if problem.recurrent else known.backend.forward
    return _in_own_precision(run, problem, inputs, known)


def backward(
    problem: Problem,
    known: KnownCall,
    inputs: Inputs,
    saved: tuple[Tensor, ...],
    do: Tensor | None,
    dfinal: Tensor | None,
) -> Inputs:
    do = torch.zeros_like(inputs.v) if do is None else do
    return _in_own_precision(known.backend.backward, problem, inputs, saved, do, dfinal, known)


def serve(problem: Problem, known: KnownCall, inputs: Inputs, slots: Slots, around: Around) -> Tensor:
    run = known.backend.decode if problem.recurrent else known.backend.prefill
    return _in_own_precision(run, problem, inputs, slots, around, known)


def _in_own_precision(run: Callable[..., Any], problem: Problem, inputs: Inputs, *more: Any) -> Any:
    """Backends choose their own precision; autocast must not round their products."""
    kind = "cuda" if inputs.q.is_cuda else problem.device.type  # whose string takes 0.2 us to make
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # of "meta" torch refuses to say
        return run(problem, inputs, *more)
    with torch.autocast(kind, enabled=False):
        return run(problem, inputs, *more)
