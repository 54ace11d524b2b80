"""Launches the kernels that compute each chunk's map of the state."""

from flash_delta.kernels.runtime.calls import AnyCall
from flash_delta.kernels.runtime.workspace import Channels, Factors, Solved
from flash_delta.kernels.triton.forward.channel import run_channel
from flash_delta.kernels.triton.forward.factor import run_factor
from flash_delta.kernels.triton.forward.solve import run_solve


def run_chunks(c: AnyCall, solved: Solved, factors: Factors, channels: Channels, *, saved: bool = False) -> None:
    """``saved``: the results of `solve` were saved."""
    if c.p.gate.kind == "channel":
        run_channel(c, solved, channels)
    if not saved:
        run_solve(c, channels, solved)
    if c.p.gate.kind != "channel":
        run_factor(c, solved, factors, follows=not saved)
