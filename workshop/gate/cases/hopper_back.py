"""What the compile gate compiles of the hand-written backward pass, for Gated DeltaNet."""

from collections.abc import Callable

import torch

from flash_delta.kernels.hopper.scalar.backward.finish import run_finish
from flash_delta.kernels.hopper.scalar.backward.memory import (
    NO_TAPES,
    Taped,
    new_ends,
    new_gates,
    new_lines,
    new_tapes,
)
from flash_delta.kernels.hopper.scalar.backward.plan import ForwardLeft, run_kernels
from flash_delta.kernels.hopper.scalar.backward.scan_gradients import run_find_ends, run_scan_gradients
from flash_delta.kernels.hopper.scalar.choices import saved_groups
from flash_delta.kernels.hopper.scalar.forward.rates import run_rates_back
from flash_delta.kernels.hopper.scalar.segments.maps import run_compose_back, run_find_maps
from flash_delta.kernels.hopper.scalar.segments.memory import new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.scan import run_retrace
from flash_delta.kernels.runtime.workspace import Trace, make_groups
from flash_delta.kernels.triton.backward.plan import make_gradients
from flash_delta.problem import Inputs, Problem
from workshop.gate.cases.rule import Planned, RuleCase, problem_of


def call_back(made: Callable[[], tuple[Problem, Inputs]], form: str) -> None:
    """Some launches of the backward pass. ``form`` says which:

    * "back": all of them, with whole sequences.
    * "back-tape": the same, with programs that share sequences.
    * "back-segments": the scans of segments.
    * "back-ends": the launches that compute the state's gradient at the end of every segment.
    """
    kernels = Planned(*made())
    c, p, memory = kernels.c, kernels.p, kernels.made
    saved, *kept = make_groups(memory, p, *saved_groups(p))
    (trace,) = kept or make_groups(memory, p, Trace)
    do, dfinal = memory.new("do", p.o_shape, p.dtype), memory.new("dfinal", p.state_shape, torch.float32)
    lines, gates, d = new_lines(memory, p), new_gates(memory, p), gradients(kernels)
    length = None if form in ("back", "back-tape") else 128
    tapes = new_tapes(memory, p, c.chip, Taped(trace=True, gradients=True) if form == "back-tape" else NO_TAPES)
    segmented, between = new_segmented_scan(memory, p, length, saved.A), new_ends(memory, p, length)
    left = ForwardLeft(trace=bool(kept), maps=False)
    if length is None:
        run_kernels(c, saved.norms, (gates, segmented, between, tapes, trace, lines), left, do, dfinal, d)
    elif form == "back-segments":
        run_retrace(c, gates.rates, segmented, trace)
        run_scan_gradients(c, gates.rates, segmented, trace, do, dfinal, between.ends, lines, d)
    else:
        run_find_maps(c, gates.rates, segmented)
        run_find_ends(c, gates.rates, segmented, do, dfinal, between.D)
        run_compose_back(c, segmented, between.D, between.ends, dfinal)
    kernels.launch()


def call_gates_back() -> None:
    """The launches of `rates` and `finish` with gates that are given as log decays, and without norms."""
    p, x = problem_of(RuleCase())
    kernels = Planned(p._replace(needs_grad=True), x)
    gates = new_gates(kernels.made, kernels.p)
    run_rates_back(kernels.c, gates.rates, None, gates.decays)
    run_finish(kernels.c, gates, None, new_lines(kernels.made, kernels.p), gradients(kernels))
    kernels.launch()


def gradients(kernels: Planned) -> Inputs:
    """Where gradients go: those of A_log and dt_bias for every chunk."""
    d, parts = make_gradients(kernels.made, kernels.p, kernels.x)
    return d._replace(**parts)
