"""Runs a problem on its backend, without autocast."""

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
    """Runs a function of a backend without autocast, because backends choose their precision by themselves."""
    kind = "cuda" if inputs.q.is_cuda else problem.device.type  # `device.type` takes 0.2 us
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch raises an error for "meta"
        return run(problem, inputs, *more)
    with torch.autocast(kind, enabled=False):
        return run(problem, inputs, *more)
