"""The RMS norm, gated or not, forward and backward; and the sum over programs for gradients of parameters.

    y = x r w act(gate),  r = 1 / sqrt(mean(x²) + eps)

Backward, with n = x r and u = dy act(gate):

    dgate = dy n w act'(gate)        dw = sum over rows of u n        dx = r (u w - n mean(u w n))
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device.activation import sigmoid
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import Tile, next_power_of_2
from flash_delta.kernels.runtime.launch import Plan, launch


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


@triton.jit(do_not_specialize=["P"])
def total(
    parts, dweight, dbias, P, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):
    """Sums parts [P, ROWS, D] over P, always in the same order, to dweight [D, W], and the last row to dbias [D]."""
    w, d, p = tl.program_id(1), tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BP)
    inside, sums = d < D, tl.zeros([BP, BD], tl.float32)
    for first in range(0, P, BP):
        at = parts + ((first + p).to(tl.int64)[:, None] * ROWS + w) * D + d[None, :]
        sums += tl.load(at, mask=(first + p < P)[:, None] & inside[None, :], other=0.0)
    result = tl.sum(sums, 0)
    tl.store(dweight + d * W + w, result.to(dweight.dtype.element_ty), mask=inside & (w < W))
    if dbias is not None:
        tl.store(dbias + d, result.to(dbias.dtype.element_ty), mask=inside & (w == W))


ROWS, BACKWARD_ROWS = 4096, 1024  # numbers in a norm's tile
PROGRAMS = 1024  # at most, in a norm's backward pass: a few per multiprocessor, and few sums to add
TOTAL = Tile(4, 1, 16)
SUMMED = 128  # rows in a step of ``total``


def run_normalize(c: Call, y: Tensor) -> None:
    """x are rows [M, D], and the gate is [tokens, groups, D of the heads of a group]."""
    x, BD, rows, t = c.x, *row_tile(c.p.D, ROWS)
    M = len(x.x)
    scalars = M, c.p.eps, x.x.stride(0), token_and_head(x.gate)
    constants = {"D": c.p.D, "BD": BD, "ROWS": rows, "HEADS": heads_of(x.gate, c.p.D), "ACTIVATION": c.p.activation}
    launch(c, normalize, (x.x, x.gate, x.weight, y), Plan((-(-M // rows), 1, 1), t, scalars, constants))


def count_row_parts(c: Call) -> int:
    """The number of programs of `run_normalize_backward`."""
    _, rows, _ = row_tile(c.p.D, BACKWARD_ROWS)
    return min(PROGRAMS, -(-len(c.x.x) // rows))


def run_normalize_backward(c: Call, dx: Tensor, dgate: Tensor | None, parts: Tensor | None) -> None:
    """``c.more``: dy [M, D], and where to write the gate's gradient, or None for dgate, which is contiguous."""
    x, (dy, to), D, BD, rows, t = c.x, c.more, c.p.D, *row_tile(c.p.D, BACKWARD_ROWS)
    programs, heads = count_row_parts(c), heads_of(x.gate, D)
    dgate_strides = token_and_head(to)
    scalars = len(x.x), c.p.eps, programs * rows, x.x.stride(0), token_and_head(x.gate), dgate_strides, dy.stride(0)
    constants = {"D": D, "BD": BD, "ROWS": rows, "HEADS": heads, "GIVEN": to is not None, "ACTIVATION": c.p.activation}
    pointers = x.x, x.gate, x.weight, dy, dx, dgate if to is None else to, parts
    launch(c, normalize_backward, pointers, Plan((programs, 1, 1), t, scalars, constants))


def token_and_head(gate: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gate is None else gate.stride()[:2]


def heads_of(gate: Tensor | None, D: int) -> tuple[int, int]:
    """The heads of a token, and of a group."""
    return (1, 1) if gate is None else (gate.shape[1] * (gate.shape[2] // D), gate.shape[2] // D)


def run_total(c: Call, parts: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    P, rows, D = parts.shape
    constants = {"D": D, "W": dweight.numel() // D, "ROWS": rows, "BP": SUMMED, "BD": TOTAL.BV}
    launch(c, total, (parts, dweight, dbias), Plan((-(-D // TOTAL.BV), rows, 1), TOTAL, (P,), constants))


def run_sum(c: Call, parts: Tensor, sums: Tensor) -> None:
    """Sums parts [P, D] over P, always in the same order."""
    P, D = parts.shape
    constants = {"D": D, "W": 1, "ROWS": 1, "BP": SUMMED, "BD": TOTAL.BV}
    launch(c, total, (parts, sums, None), Plan((-(-D // TOTAL.BV), 1, 1), TOTAL, (P,), constants))


def row_tile(D: int, numbers: int) -> tuple[int, int, Tile]:
    """Columns and rows of a norm's tile, and its warps."""
    BD = next_power_of_2(D)
    return BD, max(1, numbers // BD), Tile(4 if numbers >= BD else 8, 1)
