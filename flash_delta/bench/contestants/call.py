"""The call that a contestant returns from ``prepare``."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

NO_LAYER = "no layer of transformers or fla calls it"
NO_CHOICE = "it leaves no choice of what is kept for the backward pass"


class Call(NamedTuple):
    """One library's call of a workload, in its own layouts. It may update states in place, so results are read once."""

    run: Callable[[], tuple[Tensor, Tensor | None]]  # what is timed: (o, final state), as the library returns them
    inputs: dict[str, Tensor]  # by our names; with kind "training" they are the leaves that get gradients
    state_v_first: bool = False  # its states are [N, HV, V, K]
    joined: Callable[[Any], Tensor] = lambda o: o  # makes o of what `run` returns; not timed
