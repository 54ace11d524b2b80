"""The backward pass with a decay per key channel: which calls have the gradients of a chunk found by `chunk_back`."""

from flash_delta.kernels.hopper.channel_backward.gradients import run_chunk_back
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.problem import Inputs, Problem

LOWEST = -5.0  # nats: what fifteen tokens fall by is no more than MILD (blocks.py)


def unsupported(p: Problem) -> str | None:
    """Why `chunk_back` cannot find the gradients of ``p``."""
    if p.H != p.HV:
        return f"by hand they are found for as many key heads as value heads; there are {p.H} and {p.HV}"
    if p.lower_bound is not None and p.lower_bound < LOWEST:
        return f"by hand they are found with a lower_bound of {LOWEST:g} or more, it is {p.lower_bound:g}"
    return None


def find_gradients(c: Call, memory: tuple[Workspace, ...], d: Inputs) -> None:
    """Launches `chunk_back`, once more where chunks may be left."""
    solved, _, channels, residual, chain, deep = (group for w in memory for group in w.views())
    given = c, channels, solved, residual, chain, deep, c.more[0], d
    run_chunk_back(*given, rest=False)
    if c.p.lower_bound is None:
        run_chunk_back(*given, rest=True)
