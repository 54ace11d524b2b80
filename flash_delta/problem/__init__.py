"""The types that ops and backends exchange: the problem, its tensors, its results.

An op checks its arguments and makes a :class:`Problem`. Every backend takes ``(problem, inputs)``. This room computes
nothing and imports only torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_delta.problem.elementwise import (
    ConvolutionProblem,
    Convolved,
    ConvolvedHeads,
    ElementwiseInputs,
    ElementwiseProblem,
    Gated,
    GateProblem,
    Int8Problem,
    Mixed,
    Normalized,
    NormProblem,
    Resting,
)
from flash_delta.problem.marks import (
    ENVIRONMENT,
    MOST_GATES,
    MOST_TAPS,
    PACKAGE,
    SHORT,
    WIDEST_ROW,
    Compiled,
    Schema,
    marked,
)
from flash_delta.problem.parts import Form, Gate, Pools, gate_of
from flash_delta.problem.rule import Around, Inputs, Outputs, Problem, Slots, sharing, strength_dtype

__all__ = [
    "ENVIRONMENT",
    "MOST_GATES",
    "MOST_TAPS",
    "PACKAGE",
    "SHORT",
    "WIDEST_ROW",
    "Around",
    "Compiled",
    "ConvolutionProblem",
    "Convolved",
    "ConvolvedHeads",
    "ElementwiseInputs",
    "ElementwiseProblem",
    "Form",
    "Gate",
    "GateProblem",
    "Gated",
    "Inputs",
    "Int8Problem",
    "KnownCall",
    "Mixed",
    "NormProblem",
    "Normalized",
    "Outputs",
    "Pools",
    "Problem",
    "Resting",
    "Schema",
    "Slots",
    "gate_of",
    "marked",
    "needs_gradient",
    "sharing",
    "strength_dtype",
]


@dataclass(slots=True, eq=False)
class KnownCall:
    """What is known about a call. It is valid for all calls that differ only in the values of their tensors."""

    problem: Problem | ElementwiseProblem
    backend: ModuleType  # the backend that runs it
    needs_grad: bool
    launches: dict[Any, Any] = field(default_factory=dict)  # what the backend keeps for the next such call
    # The backend's function, once it has run this call: it launches the same. For serving calls: (problem, x, slots,
    # around, known) -> o. For a recurrent op without gradients: (problem, x, known) -> Outputs.
    again: Callable[..., Any] | None = None


def needs_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd has to record a call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
