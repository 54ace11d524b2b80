"""What a backward pass takes, and the gradients that it returns, from what launches have left."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from flash_delta.problem import Inputs


class OutputGradients(NamedTuple):
    """The gradients of a call's results."""

    do: Any
    dfinal: Any


class Saved(NamedTuple):
    """What the forward pass has saved; None: nothing, so everything is computed again."""

    saved: Any


def gradients_of(x: Inputs, made: Iterable[Tensor | None]) -> Inputs:
    """The gradients. ``made``: the same, but those of A_log and dt_bias are float32 sums, per head or per chunk."""
    d = Inputs(*made)
    if x.A_log is not None or x.dt_bias is not None:
        d = d._replace(A_log=summed(d.A_log, x.A_log), dt_bias=summed(d.dt_bias, x.dt_bias))
    return d


def summed(sums: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a parameter, from its float32 sums per head, or per chunk, head and channel."""
    if like is None:
        return None
    if sums.dim() == 1:
        return sums.view(like.shape).to(like.dtype)
    over = 0 if like.numel() == sums.shape[1:].numel() else (0, 2)
    return sums.sum(over).reshape(like.shape).to(like.dtype)
