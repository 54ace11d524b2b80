"""Raw gate activations to log decays, forward and backward. A gate per head is a gate per channel with K = 1.

    y = -e^A_log softplus(g + dt_bias),  with a bound  y = bound sigmoid(e^A_log (g + dt_bias))

The formulas are those of kernels/device. Channels of all heads are one axis of D = HV K.
"""

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.gates import channel_gate_backward, channel_log_decay, head_log_decay
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Chip, Tile, next_power_of_2
from flash_delta.kernels.runtime.plan import Layout, Making, Plan, Step
from flash_delta.problem import MOST_GATES, Gated, GateProblem


@triton.jit
def load_gates(x, row, d, row_stride, head_stride, channel_stride, mask, K: tl.constexpr):
    at = (d // K).to(tl.int64) * head_stride + (d % K).to(tl.int64) * channel_stride
    return tl.load(x + row.to(tl.int64)[:, None] * row_stride + at[None, :], mask=mask, other=0.0)


@triton.jit
def rate_and_bias(A_log, dt_bias, d, D, K: tl.constexpr):
    """e^A_log and the bias of channels d, 1 and 0 if there is none: [1, BD]."""
    rate, bias = tl.full(d.shape, 1.0, tl.float32), tl.zeros(d.shape, tl.float32)
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + d // K, mask=d < D, other=0.0).to(tl.float32))
    if dt_bias is not None:
        bias = tl.load(dt_bias + d, mask=d < D, other=0.0).to(tl.float32)
    return rate[None, :], bias[None, :]


@triton.jit
def decays_of(a, rate, bias, bound, BOUNDED: tl.constexpr):
    if BOUNDED:
        return channel_log_decay(a, rate, bias, bound, 1.0, True, True)
    else:  # `channel_log_decay` would clamp at its least log decay
        return head_log_decay(a, -rate, bias)


@triton.jit(do_not_specialize=["M", "bound"])
def decay(
    g, A_log, dt_bias, y, M, bound, row_stride, head_stride, channel_stride, D, K: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """A program has BD channels of ROWS of the M rows. y [M, D] is contiguous."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (row < M)[:, None] & (d < D)[None, :]
    rate, bias = rate_and_bias(A_log, dt_bias, d, D, K)
    a = load_gates(g, row, d, row_stride, head_stride, channel_stride, inside, K)
    result = decays_of(a, rate, bias, bound, BOUNDED)
    at = y + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "bound", "step"])
def decay_backward(
    g, A_log, dt_bias, dy, dg, parts, M, bound, step, row_stride, head_stride, channel_stride, dy_row_stride,
    dy_head_stride, dy_channel_stride, D, K: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS of the M rows at a time, and the next ones ``step`` rows further on. It writes parts
    [programs, 2, D]: the channels' parts of the gradients of A_log and dt_bias. dg is contiguous."""
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    rate, bias = rate_and_bias(A_log, dt_bias, d, D, K)
    dA, dbias = tl.zeros([ROWS, BD], tl.float32), tl.zeros([ROWS, BD], tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, step):
        row = first + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (d < D)[None, :]
        a = load_gates(g, row, d, row_stride, head_stride, channel_stride, inside, K)
        dresult = load_gates(dy, row, d, dy_row_stride, dy_head_stride, dy_channel_stride, inside, K).to(tl.float32)
        result = decays_of(a, rate, bias, bound, BOUNDED)
        da, more = channel_gate_backward(dresult, result, a, rate, bias, inside, BOUNDED)
        tl.store(dg + row.to(tl.int64)[:, None] * D + d[None, :], da.to(dg.dtype.element_ty), mask=inside)
        dA += more
        dbias += da
    at = parts + tl.program_id(0).to(tl.int64) * 2 * D + d
    tl.store(at, tl.sum(dA, 0), mask=d < D)
    tl.store(at + D, tl.sum(dbias, 0), mask=d < D)


NUMBERS, BACKWARD_NUMBERS = 2048, 1024  # numbers in a tile
COLUMNS = MOST_GATES // MOST_PROGRAMS  # columns in a tile, at most
PROGRAMS = 1024  # at most, in the backward pass: a few per multiprocessor, and few sums to add
WARPS = Tile(4, 1)


class GateGradient(NamedTuple):
    """The gradient of a gate's result."""

    dy: Any


def plan_gate(p: GateProblem, chip: Chip, x: Gated) -> Plan:
    """y, in the shape of g."""
    made = Making()
    y = made.new("y", x.g.shape, p.output_dtype)
    if 0 in x.g.shape:
        return Plan((), tuple(made), (y,))
    (blocks, rows), constants = _tile(p, NUMBERS)
    (g, strides), M = _heads(made, p, x.g), prod(x.g.shape) // (p.HV * p.K)
    arguments = g, *_parameters(made, x), y, M, p.gate.bound or 0.0, *strides, p.HV * p.K
    return Plan((Step(decay, (-(-M // rows), blocks, 1), WARPS, arguments, constants),), tuple(made), (y,))


def plan_gate_backward(p: GateProblem, chip: Chip, x: Gated, after: GateGradient) -> Plan:
    """The gradient of g, and the programs' parts of those of A_log and dt_bias, [programs, 2, HV, K]."""
    made = Making()
    dg, M = made.like("dg", x.g), prod(x.g.shape) // (p.HV * p.K)
    (blocks, rows), constants = _tile(p, BACKWARD_NUMBERS)
    programs = min(max(1, PROGRAMS // blocks), -(-M // rows))
    parts = made.new("parts", (programs, 2, p.HV, p.K), torch.float32)
    if not M:
        return Plan((), tuple(made), (dg, parts))
    (g, strides), (dy, dy_strides) = _heads(made, p, x.g), _heads(made, p, after.dy)
    numbers = M, p.gate.bound or 0.0, programs * rows, *strides, *dy_strides, p.HV * p.K
    arguments = g, *_parameters(made, x), dy, dg, parts, *numbers
    return Plan((Step(decay_backward, (programs, blocks, 1), WARPS, arguments, constants),), tuple(made), (dg, parts))


def _heads(made: Making, p: GateProblem, t: Layout) -> tuple[Layout, tuple[int, ...]]:
    """A tensor as rows [M, HV, K], without a copy if strides allow it, and its strides."""
    if p.gate.kind == "channel":
        return made.rows(t, 2)
    rows, strides = made.rows(t, 1)
    return rows, (*strides, 1)


def _parameters(made: Making, x: Gated) -> tuple[Layout | None, Layout | None]:
    return made.whole(x.A_log), made.whole(x.dt_bias)


def _tile(p: GateProblem, numbers: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Blocks of columns and rows of a tile, and the kernel's constants."""
    D = p.HV * p.K
    BD = min(COLUMNS, next_power_of_2(D))
    rows = numbers // BD
    constants = {"K": p.K, "BD": BD, "ROWS": rows, "BOUNDED": p.gate.bound is not None}
    return (-(-D // BD), rows), constants
