"""Launches the kernels of a walk in segments."""

from torch import Tensor

from flash_delta.kernels.hopper.segments.factor import run_factor_chunks
from flash_delta.kernels.hopper.segments.maps import run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.segments.memory import Walk, new_walk
from flash_delta.kernels.hopper.segments.plan import split_endless
from flash_delta.kernels.hopper.segments.scan import run_walk_segments
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Residual


def run_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, w: Walk, residual: Residual | None = None) -> None:
    """Does what `run_loop` does, in segments."""
    run_factor_chunks(c, rates, w)
    if w.starts is not None:
        run_find_maps(c, rates, w)
        run_compose_maps(c, w)
    run_walk_segments(c, o, final, rates, w, residual)


def compile_walk(c: Call, o: Tensor, final: Tensor, rates: Tensor, residual: Residual | None) -> None:
    """Compiles what calls of other sizes may launch."""
    length = split_endless(c.p, c.shape.chip.processors)
    if length is not None:
        run_walk(c, o, final, rates, new_walk(c.p._replace(N=1, T=1), length), residual)
