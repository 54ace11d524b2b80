"""Launches the kernels of a scan in segments."""

from flash_delta.kernels.hopper.scalar.segments.factor import run_factor_chunks
from flash_delta.kernels.hopper.scalar.segments.maps import run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.scalar.segments.memory import SegmentedScan
from flash_delta.kernels.hopper.scalar.segments.scan import run_scan_segments
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Trace


def run_segmented_scan(
    c: Draft, o: Layout, final: Layout, rates: Layout, w: SegmentedScan, trace: Trace | None = None
) -> None:
    """Does the same as `run_loop`, in segments."""
    run_factor_chunks(c, rates, w)
    if w.starts is not None:
        run_find_maps(c, rates, w)
        run_compose_maps(c, w)
    run_scan_segments(c, o, final, rates, w, trace)
