"""The backward pass by hand: which calls it runs, and what it launches, one after the other."""

from typing import Any, NamedTuple

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.plans.boxes import as_taken, describe
from flash_delta.kernels.hopper.plans.padding import (
    PaddedResults,
    gradients_in,
    padded,
    pads,
    run_narrow,
    run_widen,
)
from flash_delta.kernels.hopper.plans.tape import run_lay_tape
from flash_delta.kernels.hopper.scalar.backward.finish import run_finish
from flash_delta.kernels.hopper.scalar.backward.memory import (
    NO_TAPES,
    Ends,
    Gates,
    GradientLines,
    Taped,
    Tapes,
    choose_tapes,
    new_ends,
    new_gates,
    new_lines,
    new_tapes,
)
from flash_delta.kernels.hopper.scalar.backward.scan_gradients import run_find_ends, run_scan_gradients
from flash_delta.kernels.hopper.scalar.choices import goes_back, saved_bytes, saved_groups, segment_length
from flash_delta.kernels.hopper.scalar.forward.rates import run_rates_back
from flash_delta.kernels.hopper.scalar.segments.maps import run_compose_back, run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.scalar.segments.memory import SegmentedScan, maps_in, new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.scan import run_retrace
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import EVERY, Draft, Layout, Making, Plan
from flash_delta.kernels.runtime.workspace import Trace, groups_in, make_groups
from flash_delta.kernels.triton.backward.plan import make_gradients
from flash_delta.kernels.triton.backward.plan import plan_usual_backward as plan_usual
from flash_delta.kernels.triton.backward.results import OutputGradients
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.problem import Inputs, Problem


class ForwardLeft(NamedTuple):
    """What the forward pass has left."""

    trace: bool
    maps: bool


class Kept(NamedTuple):
    """What the forward pass has saved."""

    saved: Any
    left: Any = None  # the maps of segments; None if the call has none


class ScanBack(NamedTuple):
    """How sequences are scanned."""

    length: int | None  # tokens of a segment; None: sequences are not split
    taped: Taped = NO_TAPES


def choose_backward(p: Problem, chip: Chip) -> ScanBack:
    wide = padded(p)
    length = segment_length(wide, chip)
    return ScanBack(length, choose_tapes(wide, chip) if length is None else NO_TAPES)


def plan_backward(
    p: Problem, chip: Chip, x: Inputs, after: OutputGradients, kept: Kept, *, choice: ScanBack
) -> Plan:  # fmt: skip
    """The gradients of all inputs but the bounds. Those of A_log and dt_bias are float32 sums per head, and that of the
    initial states is in the dtype in which kernels take them. Copies with padding can be made of any layout."""
    made, (do, dfinal) = Making(), after
    if not pads(p):
        x, do, dfinal = as_taken(made, x), describe(made, do), made.plain_states(dfinal)
    c = draft_of(p, chip, x, choice, made)
    found, parts = make_gradients(made, p, c.x)
    d = wanted = found._replace(**parts)
    if pads(p):
        inside, copies = run_widen(c, do, dfinal)
        d, do, dfinal = gradients_in(made, copies, wanted), copies.do, copies.dfinal
        _find(inside, do, dfinal, kept, choice, d)
        run_narrow(c, *(PaddedResults((t.q, t.k, t.v), t.initial_state) for t in (d, wanted)))
    else:
        _find(c, do, dfinal, kept, choice, d)
    for name, t in parts.items():
        c.steps.append(sum_parts(t, getattr(found, name)))
    return c.plan(*found[:9])


def plan_usual_backward(p: Problem, chip: Chip, x: Inputs, choice: Any = EVERY) -> Plan | None:
    """The backward pass of most calls (triton/backward/plan.py). None if this one does not run."""
    return None if not goes_back(p) else plan_usual(p, chip, x, plan_backward, Kept, saved_bytes(p), choice)


def _find(c: Draft, do: Layout, dfinal: Layout | None, given: Kept, choice: ScanBack, d: Inputs) -> None:
    """Launches all kernels of heads that are not padded. ``d``: where gradients go."""
    made, p = c.made, c.p
    solved, *kept = groups_in(given.saved, p, *saved_groups(p))
    gates, lines = new_gates(made, p), new_lines(made, p)
    (trace,) = kept or make_groups(made, p, Trace)
    if c.every:  # whole sequences, also on tapes, and segments
        one = p._replace(N=1, T=1)
        scans = [(one, ScanBack(None)), (one, ScanBack(None, Taped(trace=True, gradients=True))), (one, ScanBack(C))]
    else:
        scans = [(p, choice)]
    left = ForwardLeft(trace=bool(kept), maps=given.left is not None and not c.every)
    for of, scan in scans:
        if left.maps:
            w = SegmentedScan(scan.length, solved.A, None, *maps_in(p, scan.length, given.left))
        else:
            w = new_segmented_scan(made, of, scan.length, solved.A)
        tapes = new_tapes(made, of, c.chip, scan.taped)
        memory = gates, w, new_ends(made, of, scan.length), tapes, trace, lines
        run_kernels(c, solved.norms, memory, left, do, dfinal, d)


def run_kernels(
    c: Draft, norms: Layout | None, memory: tuple[Gates, SegmentedScan, Ends, Tapes, Trace, GradientLines],
    left: ForwardLeft, do: Layout, dfinal: Layout | None, d: Inputs,
) -> None:  # fmt: skip
    """Launches all kernels, except those whose results the forward pass has left."""
    gates, w, between, tapes, trace, parts = memory
    rates, split = gates.rates, w.starts is not None
    run_rates_back(c, rates, norms, gates.decays)  # starts after all before it; the others may start earlier
    for tape in tapes:
        if tape is not None:
            run_lay_tape(c, tape, follows=True)
    if split and not left.maps:
        run_find_maps(c, rates, w)
        if not left.trace:
            run_compose_maps(c, w)
    if not left.trace:
        run_retrace(c, rates, w, trace, tapes.trace)
    if split:
        run_find_ends(c, rates, w, do, dfinal, between.D)
        run_compose_back(c, w, between.D, between.ends, dfinal)
    run_scan_gradients(c, rates, w, trace, do, dfinal, between.ends, parts, d, tapes.gradients)
    run_finish(c, gates, norms, parts, d)
