"""Raw gate activations to log decays, forward and backward. A gate per head is a gate per channel with K = 1.

    y = -e^A_log softplus(g + dt_bias),  with a bound  y = bound sigmoid(e^A_log (g + dt_bias))

The formulas are those of kernels/device. Channels of all heads are one axis of D = HV K.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device.gates import channel_gate_backward, channel_log_decay, head_log_decay
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import MOST_PROGRAMS, Tile, next_power_of_2
from flash_delta.kernels.runtime.launch import Plan, launch
from flash_delta.problem import MOST_GATES


@triton.jit
def load_gates(x, row, d, row_stride, head_stride, channel_stride, mask, K: tl.constexpr):
    at = (d // K).to(tl.int64) * head_stride + (d % K).to(tl.int64) * channel_stride
    return tl.load(x + row.to(tl.int64)[:, None] * row_stride + at[None, :], mask=mask, other=0.0)


@triton.jit
def rate_and_bias(A_log, dt_bias, d, D: tl.constexpr, K: tl.constexpr):
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
    g, A_log, dt_bias, y, M, bound, row_stride, head_stride, channel_stride, D: tl.constexpr, K: tl.constexpr,
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
    dy_head_stride, dy_channel_stride, D: tl.constexpr, K: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
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


def run_decay(c: Call, y: Tensor) -> None:
    """g is [M, HV, K]."""
    x, M = c.x, len(c.x.g)
    (blocks, rows), constants = _tile(c, NUMBERS)
    grid = -(-M // rows), blocks, 1
    launch(c, decay, (*x, y), Plan(grid, WARPS, (M, c.p.gate.bound or 0.0, *x.g.stride()), constants))


def count_gate_parts(c: Call) -> int:
    """The number of programs of `run_decay_backward` along the rows."""
    (blocks, rows), _ = _tile(c, BACKWARD_NUMBERS)
    return min(max(1, PROGRAMS // blocks), -(-len(c.x.g) // rows))


def run_decay_backward(c: Call, dg: Tensor, parts: Tensor) -> None:
    """``c.more``: dy [M, HV, K]."""
    x, (dy,), programs = c.x, c.more, len(parts)
    (blocks, rows), constants = _tile(c, BACKWARD_NUMBERS)
    scalars = len(x.g), c.p.gate.bound or 0.0, programs * rows, *x.g.stride(), *dy.stride()
    launch(c, decay_backward, (*x, dy, dg, parts), Plan((programs, blocks, 1), WARPS, scalars, constants))


def _tile(c: Call, numbers: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Blocks of columns and rows of a tile, and the kernel's constants."""
    D = c.p.HV * c.p.K
    BD = min(COLUMNS, next_power_of_2(D))
    rows = numbers // BD
    constants = {"D": D, "K": c.p.K, "BD": BD, "ROWS": rows, "BOUNDED": c.p.gate.bound is not None}
    return (-(-D // BD), rows), constants
