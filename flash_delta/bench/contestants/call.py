"""What a contestant hands over to be timed."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

NO_LAYER = "no layer of transformers or fla calls it"
NO_CHOICE = "it leaves no choice of what is kept for the backward pass"


class Call(NamedTuple):
    """One library's call of a workload, in its own layouts. States may be updated in place: results are read once."""

    run: Callable[[], tuple[Tensor, Tensor | None]]  # what is timed: (o, final state), as the library returns them
    inputs: dict[str, Tensor]  # what it reads, by our names; leaves of the gradients with kind "training"
    state_v_first: bool = False  # its states are [N, HV, V, K]
    joined: Callable[[Any], Tensor] = lambda o: o  # of what it returns as o; outside of what is timed
