"""A problem on its backend, in the precision of the backend's choice."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from flash_delta.ops._backend import load_backend
from flash_delta.problem import Around, Inputs, Outputs, Problem, Slots


def forward(problem: Problem, backend: str, inputs: Inputs) -> Outputs:
    module = load_backend(backend)
    with _own_precision(problem):
        return (module.step if problem.recurrent else module.forward)(problem, inputs)


def backward(
    problem: Problem, backend: str, inputs: Inputs, saved: tuple[Tensor, ...], do: Tensor | None, dfinal: Tensor | None
) -> Inputs:
    do = torch.zeros_like(inputs.v) if do is None else do
    with _own_precision(problem):
        return load_backend(backend).backward(problem, inputs, saved, do, dfinal)


def serve(problem: Problem, backend: str, inputs: Inputs, slots: Slots, around: Around) -> Tensor:
    module = load_backend(backend)
    with _own_precision(problem):
        if problem.recurrent:
            return module.decode(problem, inputs, slots, around)
        return module.prefill(problem, inputs, slots)


def _own_precision(problem: Problem) -> AbstractContextManager:
    """Backends choose their own precision; autocast must not round their products."""
    device = problem.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
