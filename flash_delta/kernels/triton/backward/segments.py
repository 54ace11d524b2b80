"""The backward pass of a long sequence on few heads, in segments that run at the same time.

It mirrors forward/segments.py. A run of chunks maps the gradient of the state at its end exactly to that at its start:
dS_start = Phi^T dS_end + D, with the Phi of the forward pass.

    `scan` computes the maps of the states again; if it also has to compute again what was not saved, `compose`
    computes the states that segments start from;
    `scan_backward` with ENDS computes D of all segments;
    `compose` computes the gradient that comes into every segment from the right;
    `scan_backward` scans all segments.
"""

from typing import Any, NamedTuple

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime.arguments import states
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.kernels.runtime.workspace import Channels, Factors, Residual, Solved, StateGradients
from flash_delta.kernels.triton.backward.scan_backward import launch_scan_backward
from flash_delta.kernels.triton.forward.segments import (
    SegmentedScan,
    by_value,
    compose_states,
    new_segmented_scan,
    new_states,
    run_compose,
    run_maps,
)
from flash_delta.kernels.triton.tiles import Segments, back_tiles, plan_back_endless
from flash_delta.problem import Problem

NOTHING = (None,) * 5  # tensors saved for chunks, and their gradients


class SegmentedBack(NamedTuple):
    """How sequences are split, and the tensors that the kernels pass to each other."""

    scan: SegmentedScan
    D: Any  # [slots, HV, V, K] float32
    ends: Any  # [slots, HV, V, K] float32: the gradient that comes into a segment from the right


def new_segmented_back(p: Problem, split: Segments | None, made: Making) -> SegmentedBack | None:
    """The memory of a backward pass in segments, as of `new_segmented_scan`."""
    scan = new_segmented_scan(p, split, made)
    return scan and SegmentedBack(scan, *(new_states(p, split, p.V, made, name) for name in ("D", "ends")))


def run_segmented_back(
    c: Draft, ch: Channels, s: Solved, f: Factors, r: Residual, do: Layout, dfinal: Layout | None,
    chain: StateGradients, dinitial: Layout | None, w: SegmentedBack | None, *, recompute: bool,
) -> None:  # fmt: skip
    """Does the same as `run_scan_backward`. Without ``w`` it does nothing. A draft for every size gets
    all that calls of other sizes may launch, for any ``w``."""
    if c.every:
        w = new_segmented_back(c.p._replace(N=1, T=0), plan_back_endless(c.p, c.chip), c.made)
    if w is None:
        return
    run_maps(c, ch, s, f, w.scan, follows=recompute)  # without recompute it is the first kernel of the call
    if recompute:
        run_compose(c, w.scan)
    run_ends(c, ch, s, f, do, dfinal, w)
    compose_states(c, w.scan, w.D, w.ends, dfinal, back=True)
    run_segments_back(c, ch, s, f, r, do, chain, dinitial, w, recompute=recompute)


def run_ends(
    c: Draft, ch: Channels, s: Solved, f: Factors, do: Layout, dfinal: Layout | None, w: SegmentedBack
) -> None:
    p, length = c.p, w.scan.split.length
    ends, own = (None, dfinal, *NOTHING, w.D), (states(p, None), states(p, dfinal), by_value(w.D))
    for t in back_tiles(p, c.chip, length, c.every, recompute=False):
        launch_scan_backward(
            c, ch, s, f, do, ends, own, t, count_slots(p, length), length, FINAL=dfinal is not None, INITIAL=False,
            RECOMPUTE=False, SEGMENTS=True, ENDS=True, follows=True,
        )  # fmt: skip


def run_segments_back(
    c: Draft, ch: Channels, s: Solved, f: Factors, r: Residual, do: Layout, chain: StateGradients,
    dinitial: Layout | None, w: SegmentedBack, *, recompute: bool,
) -> None:  # fmt: skip
    p, length = c.p, w.scan.split.length
    ends = (w.scan.starts, w.ends, *r, *chain, dinitial)
    own = (by_value(w.scan.starts), by_value(w.ends), states(p, dinitial))
    for t in back_tiles(p, c.chip, length, c.every, recompute=recompute):
        launch_scan_backward(
            c, ch, s, f, do, ends, own, t, count_slots(p, length), length, FINAL=False, INITIAL=dinitial is not None,
            RECOMPUTE=recompute, SEGMENTS=True, ENDS=False, follows=True,
        )  # fmt: skip
