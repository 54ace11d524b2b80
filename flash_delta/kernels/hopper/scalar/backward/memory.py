"""The tensors that the kernels of the backward pass pass to each other."""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.hopper.plans.tape import Tape, new_tape
from flash_delta.kernels.hopper.plans.tiles import RETRACE_PACE, SCAN_GRADIENTS_PACE, backward_needs_tape
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Layout, Making
from flash_delta.problem import Problem

# The lines of `GradientLines.lines` for one chunk and value head, 64 float32 numbers each. Except in THROUGH these are
# numbers of tokens.
READS = gl.constexpr(0)  # <q, dq> + <k, dk>, of the parts by which queries read and keys erase S0
ERASED = gl.constexpr(1)  # <dV, U>, which is b^2 dbeta
TAKEN = gl.constexpr(2)  # sums over j of <dV_i, U_j> L_ij: `finish` uses it if b_i is tiny
PAIRS = gl.constexpr(3)  # four lines, one per warp: for each gate the sum over the pairs of tokens around it
FIXED = gl.constexpr(7)  # the number of lines so far. Then every 64 value columns have GROUP lines:
WRITES = gl.constexpr(0)  # four of them, one per warp: <dU, U>, with the part of dU that comes from dS1
THROUGH = gl.constexpr(4)  # <S0, dS1>, one number per value column
GROUP = gl.constexpr(5)

# Barriers of `scan_gradients`, whose docstring says who completes them. The first two are rings.
BackBarriers = namedtuple(
    "BackBarriers", "kq_full kq_free a_full u_full s_full do_full a_free do_free p_ready dv_ready mid g_done"
)


def count_lines(V: int) -> int:
    return FIXED.value + GROUP.value * (V // C)


class Gates(NamedTuple):
    """What `rates` computes for this pass (scalar/forward/rates.py)."""

    rates: Layout  # [slots * HV * 2, 4 C] float32
    decays: Any  # [slots, HV, C] float32: log decays; None without a raw gate


class GradientLines(NamedTuple):
    """What `scan_gradients` leaves for `sum_heads` and `finish`."""

    dq: Layout  # [B, T / steps, HV, K]: of every value head, and not yet taken back through a norm
    dk: Layout  # [B, T, HV, K]
    lines: Layout  # [slots, HV, lines, C] float32


class Tapes(NamedTuple):
    """The tapes on which whole sequences are scanned. None: programs scan whole items."""

    trace: Tape | None  # of `run_retrace`; None also if the forward pass has left its results
    gradients: Tape | None  # of `run_scan_gradients`, on which every item begins with its last chunk


class Taped(NamedTuple):
    """Which of these scans have a tape."""

    trace: bool
    gradients: bool


NO_TAPES = Taped(trace=False, gradients=False)


class Ends(NamedTuple):
    """Gradients of the states at the bounds of segments, [slots of segments, HV, V, K] float32."""

    D: Any  # at the start of a segment, if the gradient at its end is zero
    ends: Any  # at the end of a segment


def new_gates(made: Making, p: Problem) -> Gates:
    decays = made.new("decays", (count_slots(p), p.HV, C), torch.float32) if p.gate.raw else None
    return Gates(new_rates(made, p), decays)


def new_lines(made: Making, p: Problem) -> GradientLines:
    rows = (("dq", p.T // p.steps), ("dk", p.T))
    dq, dk = (made.new(f"{name} of value heads", (p.B, T, p.HV, p.K), p.dtype) for name, T in rows)
    lines = made.new("lines", (count_slots(p), p.HV, count_lines(p.V), C), torch.float32)
    return GradientLines(dq, dk, lines)


def choose_tapes(p: Problem, chip: Chip) -> Taped:
    """Which scans of whole sequences have a tape."""
    programs = min(p.N * p.HV, chip.processors)
    trace, gradients = (backward_needs_tape(p, programs, pace[p.K]) for pace in (RETRACE_PACE, SCAN_GRADIENTS_PACE))
    return Taped(trace and not p.disable_recompute, gradients)


def new_tapes(made: Making, p: Problem, chip: Chip, taped: Taped) -> Tapes:
    """Memory for the tapes of whole sequences."""
    programs, paces = min(p.N * p.HV, chip.processors), (RETRACE_PACE, SCAN_GRADIENTS_PACE)
    return Tapes(*(
        new_tape(made, p, programs, pace[p.K], name=f"tape of {name}") if yes else None
        for name, pace, yes in zip(Taped._fields, paces, taped, strict=True)
    ))  # fmt: skip


def new_ends(made: Making, p: Problem, length: int | None) -> Ends:
    if length is None:
        return Ends(None, None)
    shape = count_slots(p, length), p.HV, p.V, p.K
    return Ends(*(made.new(name, shape, torch.float32) for name in ("D", "ends")))
