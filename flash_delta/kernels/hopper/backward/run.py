"""The backward pass by hand: which calls it runs, and its launches, one after the other."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.hopper.backward.finish import run_finish
from flash_delta.kernels.hopper.backward.memory import Ends, Parts, Trace, new_ends, new_parts, new_trace
from flash_delta.kernels.hopper.backward.walk import run_find_ends, run_walk_back
from flash_delta.kernels.hopper.segments.maps import run_compose_back, run_compose_maps, run_find_maps
from flash_delta.kernels.hopper.segments.memory import Maps, Walk, new_walk
from flash_delta.kernels.hopper.segments.scan import run_retrace
from flash_delta.kernels.runtime.arguments import every
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.compile_key import laid_out
from flash_delta.kernels.runtime.launch import Kernels, remember, replayed, run
from flash_delta.kernels.runtime.workspace import Residual, Walked, Workspace
from flash_delta.kernels.triton.backend import summed, with_flat_parameters
from flash_delta.problem import Inputs, KnownCall, Problem

WIDTHS = (64, 128)


class Left(NamedTuple):
    """What the forward pass has left."""

    trace: bool
    maps: bool


def unsupported(p: Problem) -> str | None:
    """Why the backward pass of ``p``, whose forward pass this backend runs, is that of ``triton``."""
    if p.dtype != torch.bfloat16:
        return f"U is divided by b, for which {p.dtype} has too few exponents"
    if p.K not in WIDTHS or p.V != p.K:
        return f"K and V have to be 64 or 128, both; they are {p.K} and {p.V}"
    return None


def for_backward(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """What the forward pass saves for this backward pass: with ``disable_recompute`` also states and U of chunks."""
    return Workspace(p, Walked, *((Residual,) if p.disable_recompute else ()), buffer=buffer)


def run_backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None,
    length: int | None,
) -> Inputs:  # fmt: skip
    """Gradients, as `backward` of a backend returns them. ``x``, ``do``: described to the copy engine without a copy.
    ``length``: tokens of a segment, None where sequences are not split. ``saved``: of `for_backward`, and `Maps` if the
    forward pass has left them."""
    x = with_flat_parameters(x)
    found = _new_results(p, x)
    own, kind = (*found.d, found.dA_log, found.ddt_bias, *saved), _kind(p)
    name = kind, length, len(saved), laid_out(*x, do, dfinal)
    if not replayed(known, name, x, (do, dfinal), own):
        with on(p.device):
            call = make_call(p, x, kind, do, dfinal, known=known, name=name)
            kernels, spare = _prepare(p, saved, found, length)
            run(call, kernels, *own, spare=spare)
        remember(call, x)
    sums = summed(found.dA_log, x.A_log), summed(found.ddt_bias, x.dt_bias)
    return found.d._replace(A_log=sums[0], dt_bias=sums[1])


def later_call(p: Problem, x: Inputs) -> tuple[Call, Kernels]:
    """The backward call of most forward calls with ``x``, to be compiled beside these: nobody looks at final states,
    and the gradient has no gaps."""
    nowhere, x = p._replace(device=torch.device("meta")), with_flat_parameters(x)
    do = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    kernels, _ = _prepare(nowhere, (for_backward(nowhere).buffer,), _new_results(nowhere, x), None)
    return make_call(p, x, _kind(p), do, None), kernels


class Results(NamedTuple):
    d: Inputs  # except A_log and dt_bias
    dA_log: Tensor | None  # [slots, HV] float32, as sums over chunks
    ddt_bias: Tensor | None


def _new_results(p: Problem, x: Inputs) -> Results:
    """Memory for them, on the device of ``p``."""
    d = Inputs(*(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=p.device) for t in x[:7]))
    new = partial(torch.empty, count_slots(p), p.HV, dtype=torch.float32, device=p.device)
    return Results(d, *(None if t is None else new() for t in (x.A_log, x.dt_bias)))


def _kind(p: Problem) -> tuple:
    return "hopper", "backward", p.disable_recompute


def _prepare(
    p: Problem, saved: tuple[Tensor, ...], found: Results, length: int | None
) -> tuple[Kernels, tuple[Tensor | None, ...]]:
    """What launches all kernels, and the memory that it takes for that, on the device of ``p``."""
    forward, maps = for_backward(p, saved[0]), saved[1:]
    walked, *kept = forward.views()
    parts, between = new_parts(p), new_ends(p, length)
    trace = Trace(kept[-1].states, kept[-1].U) if kept else new_trace(p)
    walk = Walk(length, walked.A, None, *Maps(*maps)) if maps else new_walk(p, length, walked.A)

    def kernels(c: Call) -> None:
        do, dfinal = c.more
        forms = [(walk, between)]
        if every(c):  # whole sequences, and segments
            one = p._replace(N=1, T=1)
            forms = [(new_walk(one, n, walked.A), new_ends(one, n)) for n in (None, C)]
        for form in forms:
            memory = *form, trace, parts
            left = Left(trace=bool(kept), maps=bool(maps) and not every(c))
            run_kernels(c, walked, memory, left, do, dfinal, *found)

    return kernels, (*parts, *(() if maps else walk[2:]), *between, *(() if kept else trace))


def run_kernels(
    c: Call, walked: Walked, memory: tuple[Walk, Ends, Trace, Parts], left: Left, do: Tensor,
    dfinal: Tensor | None, d: Inputs, dA_log: Tensor | None, ddt_bias: Tensor | None,
) -> None:  # fmt: skip
    """Launches all kernels, except those whose results the forward pass has left."""
    w, between, trace, parts = memory
    rates, split = walked.rates.view(-1, 4 * C), w.starts is not None
    if split and not left.maps:
        run_find_maps(c, rates, w)
        if not left.trace:
            run_compose_maps(c, w)
    if not left.trace:
        run_retrace(c, rates, w, trace)
    if split:
        run_find_ends(c, rates, w, do, dfinal, between.D)
        run_compose_back(c, w, between.D, between.ends, dfinal)
    run_walk_back(c, rates, w, trace, do, dfinal, between.ends, parts, d)
    run_finish(c, walked, parts, d, dA_log, ddt_bias)
