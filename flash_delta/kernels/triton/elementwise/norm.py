"""The RMS norm, gated or not, forward and backward.

    y = x r w act(gate),  r = 1 / sqrt(mean(x²) + eps)

Backward, with n = x r and u = dy act(gate):

    dgate = dy n w act'(gate)        dw = sum over rows of u n        dx = r (u w - n mean(u w n))
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.activation import sigmoid
from flash_delta.kernels.runtime.chip import Chip, Tile, next_power_of_2
from flash_delta.kernels.runtime.plan import Layout, Making, Plan, Step, has_unit_stride, row_stride
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.problem import Normalized, NormProblem


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z) and act'(z)."""
    s = sigmoid(z)
    if ACTIVATION == "silu":
        return z * s, s * (1.0 + z * (1.0 - s))
    else:
        return s, s * (1.0 - s)


@triton.jit
def load_rows(x, stride, row, d, mask):
    return tl.load(x + row.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def places_of(strides, row, d, D: tl.constexpr, HEADS: tl.constexpr):
    """Where rows of a tensor [tokens, groups, heads, D] lie, with the strides of its first two axes. HEADS: of a token,
    and of a group."""
    r, ALL, GROUP = row.to(tl.int64), HEADS[0], HEADS[1]
    if ALL == 1:
        return r[:, None] * strides[0] + d[None, :]
    place, head = r // ALL * strides[0], r % ALL
    place += head * strides[1] if GROUP == 1 else head // GROUP * strides[1] + head % GROUP * D
    return place[:, None] + d[None, :]


@triton.jit
def reciprocal_rms(x, row, M, eps, D: tl.constexpr):
    """r of every row. It is 1 for rows from M on, which are zeros. With eps = 0 r would be infinite, and 0 r NaN."""
    return tl.rsqrt(tl.where(row < M, tl.sum(x * x, 1) / D + eps, 1.0))


@triton.jit(do_not_specialize=["M", "eps"])
def normalize(
    x, gate, weight, y, M, eps, x_stride, gate_strides, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A program has ROWS of the M rows. y is contiguous. The gate is as in `places_of`."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < M)[:, None] & (d < D)[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tile = load_rows(x, x_stride, row, d, inside)
    if ACTIVATION is not None:
        given = tl.load(gate + places_of(gate_strides, row, d, D, HEADS), mask=inside, other=0.0)
        act, _ = activate(given.to(tl.float32), ACTIVATION)
    result = tile * reciprocal_rms(tile, row, M, eps, D)[:, None] * w[None, :]
    if ACTIVATION is not None:
        result *= act
    at = y + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "eps", "step"])
def normalize_backward(
    x, gate, weight, dy, dx, dgate, parts, M, eps, step, x_stride, gate_strides, dgate_strides, dy_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS of the M rows at a time, and the next ones ``step`` rows further on. It writes parts
    [programs, D] of dw, unless ``parts`` is None. GIVEN: dgate has strides, as the gate. Otherwise it is contiguous."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BD], tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, step):
        row = first + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (d < D)[None, :]
        n, u = load_rows(x, x_stride, row, d, inside), load_rows(dy, dy_stride, row, d, inside)
        at = row.to(tl.int64)[:, None] * D + d[None, :]
        if ACTIVATION is not None:
            given = tl.load(gate + places_of(gate_strides, row, d, D, HEADS), mask=inside, other=0.0)
            act, slope = activate(given.to(tl.float32), ACTIVATION)
        r = reciprocal_rms(n, row, M, eps, D)
        n *= r[:, None]
        if ACTIVATION is not None:
            to = dgate + (places_of(dgate_strides, row, d, D, HEADS) if GIVEN else at)
            tl.store(to, (u * n * w[None, :] * slope).to(dgate.dtype.element_ty), mask=inside)
            u *= act
        dw += u * n
        u *= w[None, :]
        mean = tl.sum(u * n, 1) / D
        tl.store(dx + at, ((u - n * mean[:, None]) * r[:, None]).to(dx.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dw, 0), mask=d < D)


ROWS, BACKWARD_ROWS = 4096, 1024  # numbers in a norm's tile
PROGRAMS = 1024  # at most, in a norm's backward pass: a few per multiprocessor, and few sums to add


class NormGradient(NamedTuple):
    """The gradient of a norm's result, and where to write that of the gate; None: to new memory."""

    dy: Any
    to_gate: Any


def plan_norm(p: NormProblem, chip: Chip, x: Normalized) -> Plan:
    """y, in the shape of x."""
    made = Making()
    y = made.new("y", x.x.shape, p.output_dtype or x.x.dtype)
    if 0 in x.x.shape:
        return Plan((), tuple(made), (y,))
    M, BD, rows, t = prod(x.x.shape[:-1]), *row_tile(p.D, ROWS)
    (of_x, x_row), (gate, heads, gate_strides) = _rows(made, x.x, p.D), _gate(made, x.gate, p.D)
    arguments = of_x, gate, made.whole(x.weight), y, M, p.eps, x_row, gate_strides
    constants = {"D": p.D, "BD": BD, "ROWS": rows, "HEADS": heads, "ACTIVATION": p.activation}
    return Plan((Step(normalize, (-(-M // rows), 1, 1), t, arguments, constants),), tuple(made), (y,))


def plan_norm_backward(
    p: NormProblem, chip: Chip, x: Normalized, after: NormGradient, *, weights: bool = True
) -> Plan:  # fmt: skip
    """The gradients of x, weight and the gate. ``weights``: whether that of the weight is wanted."""
    made, zero = Making(), 0.0 if 0 in x.x.shape else None
    dx, dweight = made.like("dx", x.x, zero), made.like("dweight", x.weight, zero) if weights else None
    dgate = made.like("dgate", x.gate, zero) if after.to_gate is None else None
    results = dx, dweight, dgate
    if zero is not None:
        return Plan((), tuple(made), results)
    M, BD, rows, t = prod(x.x.shape[:-1]), *row_tile(p.D, BACKWARD_ROWS)
    programs = min(PROGRAMS, -(-M // rows))
    (of_x, x_row), (dy, dy_row) = _rows(made, x.x, p.D), _rows(made, after.dy, p.D)
    # If only one of the gate and its gradient has all rows equally far apart, both are taken by heads.
    by_heads = after.to_gate is not None and None in (_row_of(x.gate, p.D), _row_of(after.to_gate, p.D))
    gate, heads, gate_strides = _gate(made, x.gate, p.D, by_heads)
    to, _, dgate_strides = _gate(made, after.to_gate, p.D, by_heads)
    if to is not after.to_gate:
        raise ValueError(f"dgate: expected rows of {p.D} numbers without gaps, got strides {after.to_gate.strides}")
    parts = made.new("parts", (programs, 1, p.D), torch.float32) if weights else None
    pointers = of_x, gate, made.whole(x.weight), dy, dx, to or dgate, parts
    numbers = M, p.eps, programs * rows, x_row, gate_strides, dgate_strides, dy_row
    constants = {"D": p.D, "BD": BD, "ROWS": rows, "HEADS": heads, "GIVEN": after.to_gate is not None}
    constants |= {"ACTIVATION": p.activation}
    steps = [Step(normalize_backward, (programs, 1, 1), t, (*pointers, *numbers), constants)]
    if weights:
        steps += [sum_parts(parts, dweight)]
    return Plan(tuple(steps), tuple(made), results)


plan_norm_backward_without_weight = partial(plan_norm_backward, weights=False)


def _rows(made: Making, t: Layout, D: int) -> tuple[Layout, int]:
    """A tensor as rows of D numbers, all equally far apart, and the stride between them."""
    row = _row_of(t, D)
    return (made.without_gaps(t), D) if row is None else (t, row)


def _gate(
    made: Making, t: Layout | None, D: int, by_heads: bool = False
) -> tuple[Layout | None, tuple[int, int], tuple[int, int]]:  # fmt: skip
    """A gate as [tokens, groups, D of the heads of a group], the heads of a token and of a group, and the strides of
    its first two axes. If all rows are equally far apart, each is a group, unless it is wanted ``by_heads``."""
    if t is None:
        return None, (1, 1), (0, 0)
    if not by_heads and (t.dim() < 3 or _row_of(t, D) is not None):
        rows, row = _rows(made, t, D)
        return rows, (1, 1), (row, D)
    groups, of_group = t.shape[-2], t.shape[-1] // D
    heads = groups * of_group, of_group
    rows, (token, group, _) = made.rows(t if has_unit_stride(t) else made.without_gaps(t), 2)
    return rows, heads, (token, group)


def _row_of(t: Layout, D: int) -> int | None:
    """The stride of the rows of D numbers of which all heads and tokens are; None if they are not equally far apart, or
    have gaps."""
    if not has_unit_stride(t):
        return None
    return row_stride((*t.shape[:-1], t.shape[-1] // D), (*t.strides[:-1], D))


def row_tile(D: int, numbers: int) -> tuple[int, int, Tile]:
    """Columns and rows of a norm's tile, and its warps."""
    BD = next_power_of_2(D)
    return BD, max(1, numbers // BD), Tile(4 if numbers >= BD else 8, 1)
