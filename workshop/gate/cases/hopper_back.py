"""What the compile gate compiles of the hand-written backward pass, for Gated DeltaNet."""

from collections.abc import Callable

import torch

from flash_delta.kernels.hopper.plans.tape import new_tape
from flash_delta.kernels.hopper.plans.tiles import Pace
from flash_delta.kernels.hopper.plans.unplanned import new_gradients
from flash_delta.kernels.hopper.scalar.backward.finish import run_finish
from flash_delta.kernels.hopper.scalar.backward.memory import Tapes, new_ends, new_gates, new_parts
from flash_delta.kernels.hopper.scalar.backward.run import NO_TAPES, ForwardLeft, for_backward, run_kernels
from flash_delta.kernels.hopper.scalar.backward.scan_gradients import run_find_ends, run_scan_gradients
from flash_delta.kernels.hopper.scalar.forward.rates import run_rates_back
from flash_delta.kernels.hopper.scalar.segments.maps import run_compose_back, run_find_maps
from flash_delta.kernels.hopper.scalar.segments.memory import new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.scan import run_retrace
from flash_delta.kernels.runtime.calls import make_call
from flash_delta.kernels.runtime.workspace import Trace, Workspace
from flash_delta.problem import Inputs, Problem
from workshop.gate.cases.rule import RuleCase, problem_of


def call_back(made: Callable[[], tuple[Problem, Inputs]], form: str) -> None:
    """Some launches of the backward pass. ``form`` says which:

    * "back": all of them, with whole sequences.
    * "back-tape": the same, with programs that share sequences.
    * "back-segments": the scans of segments.
    * "back-ends": the launches that compute the state's gradient at the end of every segment.
    """
    p, x = made()
    c = make_call(p, x, ("launches",))._replace(direct=False)
    saved, *kept = for_backward(p).views()
    (trace,) = kept or Workspace(p, Trace).views()
    do, dfinal, d = torch.empty_like(x.v), torch.empty(p.state_shape, device="meta"), new_gradients(p, x)
    parts, gates = new_parts(p), new_gates(p)
    length = None if form in ("back", "back-tape") else 128
    tapes = Tapes(*(new_tape(p, 1, Pace(1)) for _ in range(2))) if form == "back-tape" else NO_TAPES
    segmented, between = new_segmented_scan(p, length, saved.A), new_ends(p, length)
    left = ForwardLeft(trace=bool(kept), maps=False)
    if length is None:
        run_kernels(c, saved.norms, (gates, segmented, between, tapes, trace, parts), left, do, dfinal, d)
    elif form == "back-segments":
        run_retrace(c, gates.rates, segmented, trace)
        run_scan_gradients(c, gates.rates, segmented, trace, do, dfinal, between.ends, parts, d)
    else:
        run_find_maps(c, gates.rates, segmented)
        run_find_ends(c, gates.rates, segmented, do, dfinal, between.D)
        run_compose_back(c, segmented, between.D, between.ends, dfinal)


def call_gates_back() -> None:
    """The launches of `rates` and `finish` with gates that are given as log decays, and without norms."""
    p, x = problem_of(RuleCase())
    p = p._replace(needs_grad=True)
    c, gates = make_call(p, x, ("launches",))._replace(direct=False), new_gates(p)
    run_rates_back(c, gates.rates, None, gates.decays)
    run_finish(c, gates, None, new_parts(p), new_gradients(p, x))
