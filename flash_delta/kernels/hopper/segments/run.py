"""Launches the kernels of a walk in segments."""

from torch import Tensor

from flash_delta.kernels.hopper.segments.factor import run_factor
from flash_delta.kernels.hopper.segments.maps import run_compose, run_maps
from flash_delta.kernels.hopper.segments.memory import Walk
from flash_delta.kernels.hopper.segments.scan import run_segments
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Residual


def run_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk, residual: Residual | None = None) -> None:
    """Does what `run_loop` does, in segments."""
    run_factor(c, rates, w)
    if w.starts is not None:
        run_maps(c, rates, w)
        run_compose(c, w)
    run_segments(c, o, final, rates, w, residual)
