"""The backward pass by hand: which calls it runs, and its launches, one after the other."""

from functools import partial

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.hopper.backward.finish import run_finish
from flash_delta.kernels.hopper.backward.memory import Ends, Parts, Trace, new_ends, new_parts, new_trace
from flash_delta.kernels.hopper.backward.walk import run_find_ends, run_walk_back
from flash_delta.kernels.hopper.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.segments.maps import run_compose_back, run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.segments.memory import Walk, new_walk
from flash_delta.kernels.hopper.segments.scan import run_retrace
from flash_delta.kernels.runtime.arguments import every
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.compile_key import laid_out
from flash_delta.kernels.runtime.launch import remember, replayed, run
from flash_delta.kernels.runtime.workspace import Residual, Solved, Workspace
from flash_delta.kernels.triton.backend import new_gradients, summed, with_flat_parameters
from flash_delta.problem import Inputs, KnownCall, Problem

WIDTHS = (64, 128)


def unsupported(p: Problem) -> str | None:
    """Why the backward pass of ``p``, whose forward pass this backend runs, is that of ``triton``."""
    if p.dtype != torch.bfloat16:
        return f"U is divided by b, for which {p.dtype} has too few exponents"
    if p.K not in WIDTHS or p.V != p.K:
        return f"K and V have to be 64 or 128, both; they are {p.K} and {p.V}"
    return None


def for_backward(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """What the forward pass saves for this backward pass: with ``disable_recompute`` also states and U of chunks."""
    return Workspace(p, Solved, *((Residual,) if p.disable_recompute else ()), buffer=buffer)


def run_backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None,
    length: int | None,
) -> Inputs:  # fmt: skip
    """Gradients, as `backward` of a backend returns them. ``x``, ``do``: described to the copy engine without a copy.
    ``length``: tokens of a segment, None where sequences are not split."""
    x = with_flat_parameters(x)
    d = new_gradients(x)
    new = partial(torch.empty, count_slots(p), p.HV, dtype=torch.float32, device=p.device)
    dA_log, ddt_bias = (None if t is None else new() for t in (x.A_log, x.dt_bias))
    own = *d, dA_log, ddt_bias, *saved
    kind = "hopper", "backward", p.disable_recompute
    name = kind, length, laid_out(*x, do, dfinal)
    if not replayed(known, name, x, (do, dfinal), own):
        with on(p.device):
            call = make_call(p, x, kind, do, dfinal, known=known, name=name)
            _run(call, saved, d, dA_log, ddt_bias, length, own)
        remember(call, x)
    return d._replace(A_log=summed(dA_log, x.A_log), dt_bias=summed(ddt_bias, x.dt_bias))


def _run(
    call: Call, saved: tuple[Tensor, ...], d: Inputs, dA_log: Tensor | None, ddt_bias: Tensor | None,
    length: int | None, own: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    p, forward = call.p, for_backward(call.p, *saved)
    solved, *kept = forward.views()
    rates, parts = new_rates(p), new_parts(p)
    trace = Trace(kept[-1].states, kept[-1].U) if kept else new_trace(p)
    walk, between = new_walk(p, length, solved.A), new_ends(p, length)

    def kernels(c: Call) -> None:
        do, dfinal = c.more
        forms = [(walk, between)]
        if every(c):  # whole sequences, and segments
            one = p._replace(N=1, T=1)
            forms = [(new_walk(one, n, solved.A), new_ends(one, n)) for n in (None, C)]
        for form in forms:
            memory = rates, *form, trace, parts
            run_kernels(c, c.parts(forward)[0], memory, not kept, do, dfinal, d, dA_log, ddt_bias)

    spare = rates, *parts, *walk[2:], *between, *(() if kept else trace)
    run(call, kernels, *own, spare=spare)


def run_kernels(
    c: Call, solved: Solved, memory: tuple[Tensor, Walk, Ends, Trace, Parts], retraced: bool, do: Tensor,
    dfinal: Tensor | None, d: Inputs, dA_log: Tensor | None, ddt_bias: Tensor | None,
) -> None:  # fmt: skip
    """Launches all kernels. ``retraced``: the forward pass has not left the trace."""
    rates, w, between, trace, parts = memory
    split = w.starts is not None
    run_rates(c, d.v, rates, backward=True)
    if split:
        run_find_maps(c, rates, w)
    if retraced:
        if split:
            run_compose_maps(c, w)
        run_retrace(c, rates, w, trace)
    if split:
        run_find_ends(c, rates, w, do, dfinal, between.D)
        run_compose_back(c, w, between.D, between.ends, dfinal)
    run_walk_back(c, rates, w, trace, do, dfinal, between.ends, parts, d)
    run_finish(c, rates, solved, parts, d, dA_log, ddt_bias)
