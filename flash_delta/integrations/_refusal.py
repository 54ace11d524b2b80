"""Decides whether an op would run a call of an engine."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import flash_delta


def refusal(op: Callable[..., Tensor], arguments: dict[str, Any]) -> str | None:
    """Why the op would not run, or None if it would."""
    try:
        explanation = flash_delta.explain(op, **arguments)
    except ValueError as error:
        return str(error)
    return None if explanation.backend is not None else str(explanation)
