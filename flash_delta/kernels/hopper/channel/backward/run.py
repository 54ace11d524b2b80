"""The backward pass with a decay per key channel: for which calls `chunk_back` computes the gradients of chunks."""

from flash_delta.kernels.hopper.channel.backward.gradients import run_chunk_back
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.problem import Inputs, Problem

LOWEST = -5.0  # nats: fifteen tokens fall by no more than MILD (blocks.py)


def unsupported(p: Problem) -> str | None:
    """Why `chunk_back` cannot compute the gradients of ``p``. None if it can."""
    if p.H != p.HV:
        return f"by hand they are found for as many key heads as value heads; there are {p.H} and {p.HV}"
    if p.gate.bound is not None and p.gate.bound < LOWEST:
        return f"by hand they are found with a lower_bound of {LOWEST:g} or more, it is {p.gate.bound:g}"
    return None


def find_gradients(c: Call, memory: tuple[Workspace, ...], d: Inputs) -> None:
    """Launches `chunk_back`, and once more if chunks may be left."""
    solved, _, channels, residual, chain, deep = (group for w in memory for group in w.views())
    given = c, channels, solved, residual, chain, deep, c.more[0], d
    run_chunk_back(*given, rest=False)
    if c.p.gate.bound is None:
        run_chunk_back(*given, rest=True)
