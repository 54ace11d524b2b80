"""The backward pass by hand: which calls it runs, and what it launches, one after the other."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.hopper.plans.padding import (
    WIDTHS,
    PaddedResults,
    gradients_in,
    new_padded,
    padded,
    pads,
    run_narrow,
    run_widen,
)
from flash_delta.kernels.hopper.plans.tape import new_tape, run_lay_tape
from flash_delta.kernels.hopper.plans.tiles import Pace
from flash_delta.kernels.hopper.plans.unplanned import new_gradients, summing, with_contiguous_vectors
from flash_delta.kernels.hopper.scalar.backward.finish import run_finish
from flash_delta.kernels.hopper.scalar.backward.memory import (
    Ends,
    Gates,
    GradientLines,
    Tapes,
    new_ends,
    new_gates,
    new_parts,
    new_tapes,
)
from flash_delta.kernels.hopper.scalar.backward.scan_gradients import run_find_ends, run_scan_gradients
from flash_delta.kernels.hopper.scalar.forward.rates import run_rates_back
from flash_delta.kernels.hopper.scalar.segments.maps import run_compose_back, run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.scalar.segments.memory import SegmentedScan, maps_in, new_segmented_scan
from flash_delta.kernels.hopper.scalar.segments.scan import run_retrace
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.compile_key import laid_out
from flash_delta.kernels.runtime.launch import Kernels, remember, run
from flash_delta.kernels.runtime.workspace import ForBackward, Trace, Workspace
from flash_delta.problem import Inputs, KnownCall, Problem


class ForwardLeft(NamedTuple):
    """What the forward pass has left."""

    trace: bool
    maps: bool


NO_TAPES = Tapes(None, None)


def unsupported(p: Problem) -> str | None:
    """Why ``triton`` runs the backward pass of ``p``, whose forward pass this backend runs. None if it does not."""
    if p.dtype != torch.bfloat16:
        return f"U is divided by b, for which {p.dtype} has too few exponents"
    if not pads(p) and (p.K not in WIDTHS or p.V != p.K):
        return f"K and V have to be 64 or 128, both; they are {p.K} and {p.V}"
    return None


def for_backward(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """What the forward pass saves for this backward pass. With ``disable_recompute`` also states and U of chunks."""
    return Workspace(p, ForBackward, *((Trace,) if p.disable_recompute else ()), buffer=buffer)


def run_backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None,
    length: int | None, name: tuple,
) -> Inputs:  # fmt: skip
    """The tensors from which `gradients_of` makes the gradients.

    x, do: the copy engine can read them without a copy, unless heads are padded.
    length: tokens of a segment, or None if sequences are not split.
    saved: those of `for_backward`, and those of `new_maps` if the forward pass has left them.
    name: the name by which the call is known from then on."""
    found, kind = new_gradients(p, x), _kind(p)
    tapes = new_tapes(padded(p), chip_of(p.device)) if length is None else NO_TAPES
    form = length, *(tape is None for tape in tapes), len(saved)
    with on(p.device):
        call = make_call(p, x, kind, do, dfinal, known=known, name=(kind, *form, laid_out(*x, do, dfinal)))
        kernels, spare = prepare_back(p, x, (do, dfinal), saved, found, length, tapes)
        kernels, found, sums = summing(p, kernels, found)
        run(call, kernels, *found, left=saved, spare=(*spare, *sums))
    remember(call, (*x, do, dfinal), known, name)
    return found


def later_call(p: Problem, x: Inputs) -> tuple[Call, Kernels]:
    """The backward call of most forward calls with ``x``. It is compiled together with these. In most calls nobody uses
    the final states, and the gradient of o has no gaps."""
    nowhere, x = p._replace(device=torch.device("meta")), with_contiguous_vectors(x)
    do = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    saved = (for_backward(padded(nowhere)).buffer,)
    d = new_gradients(nowhere, x)
    kernels, _ = prepare_back(nowhere, x, (do, None), saved, d, None)
    return make_call(p, x, _kind(p), do, None), summing(nowhere, kernels, d)[0]


def _kind(p: Problem) -> tuple:
    return "hopper", "backward", p.disable_recompute


def prepare_back(
    given: Problem, x: Inputs, outer: tuple[Tensor, Tensor | None], saved: tuple[Tensor, ...], found: Inputs,
    length: int | None, tapes: Tapes = NO_TAPES,
) -> tuple[Kernels, tuple[Tensor | None, ...]]:  # fmt: skip
    """The function that launches all kernels, and the memory that it needs, on the device of ``given``. ``outer``: do
    and dfinal."""
    p, copies = padded(given), new_padded(given, x, *outer)
    d = found if copies is None else gradients_in(copies, found)
    forward, maps = for_backward(p, saved[0]), saved[1:]
    solved, *kept = forward.views()
    gates, parts, between = new_gates(p), new_parts(p), new_ends(p, length)
    anew = () if kept else (Workspace(p, Trace),)
    (trace,) = kept or anew[0].views()
    if maps:
        segmented = SegmentedScan(length, solved.A, None, *maps_in(p, length, *maps))
    else:
        segmented = new_segmented_scan(p, length, solved.A)

    def kernels(c: Call) -> None:
        wide = run_widen(c, copies)
        do, dfinal = wide.more
        forms = [(segmented, between, tapes)]
        if c.every:  # whole sequences, also on tapes, and segments
            one = p._replace(N=1, T=1)
            every_tape = Tapes(*(new_tape(one, 1, Pace(1)) for _ in tapes))
            each = (None, NO_TAPES), (None, every_tape), (C, NO_TAPES)
            forms = [(new_segmented_scan(one, n, solved.A), new_ends(one, n), of_form) for n, of_form in each]
        for form in forms:
            memory = gates, *form, trace, parts
            left = ForwardLeft(trace=bool(kept), maps=bool(maps) and not c.every)
            run_kernels(wide, solved.norms, memory, left, do, dfinal, d)
        run_narrow(c, *(PaddedResults((t.q, t.k, t.v), t.initial_state) for t in (d, found)))

    made = () if copies is None else (*copies, d.q, d.k, d.v, d.initial_state)
    made += tuple(t for tape in tapes if tape is not None for t in tape.memory)
    spare = *gates, *parts, *(() if maps else segmented[2:]), *between, *(t.buffer for t in anew), *made
    return kernels, spare


def run_kernels(
    c: Call, norms: Tensor | None, memory: tuple[Gates, SegmentedScan, Ends, Tapes, Trace, GradientLines],
    left: ForwardLeft, do: Tensor, dfinal: Tensor | None, d: Inputs,
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
