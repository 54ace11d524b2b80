"""The RMS norm, gated or not, forward and backward; and the sum of what programs found of parameters' gradients.

    y = x r w act(gate),  r = 1 / sqrt(mean(x²) + eps)

Backward, with n = x r and u = dy act(gate):

    dgate = dy n w act'(gate)        dw = sum over rows of u n        dx = r (u w - n mean(u w n))
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.activation import sigmoid


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
def reciprocal_rms(x, row, M, eps, D: tl.constexpr):
    """r of every row; 1 of those from M on, which are zeros: r would be infinite if eps is 0, and 0 r no number."""
    return tl.rsqrt(tl.where(row < M, tl.sum(x * x, 1) / D + eps, 1.0))


@triton.jit(do_not_specialize=["M", "eps"])
def normalize(
    x, gate, weight, y, M, eps, x_stride, gate_stride, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """ROWS of the M rows; y is contiguous."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < M)[:, None] & (d < D)[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    tile = load_rows(x, x_stride, row, d, inside)
    if ACTIVATION is not None:
        act, _ = activate(load_rows(gate, gate_stride, row, d, inside), ACTIVATION)
    result = tile * reciprocal_rms(tile, row, M, eps, D)[:, None] * w[None, :]
    if ACTIVATION is not None:
        result *= act
    at = y + row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "eps", "step"])
def normalize_backward(
    x, gate, weight, dy, dx, dgate, parts, M, eps, step, x_stride, gate_stride, dy_stride, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """ROWS of the M rows at a time, the next ones ``step`` further on; parts [programs, D] of dw."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BD], tl.float32)
    for first in range(tl.program_id(0) * ROWS, M, step):
        row = first + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (d < D)[None, :]
        n, u = load_rows(x, x_stride, row, d, inside), load_rows(dy, dy_stride, row, d, inside)
        at = row.to(tl.int64)[:, None] * D + d[None, :]
        if ACTIVATION is not None:
            act, slope = activate(load_rows(gate, gate_stride, row, d, inside), ACTIVATION)
        r = reciprocal_rms(n, row, M, eps, D)
        n *= r[:, None]
        if ACTIVATION is not None:
            tl.store(dgate + at, (u * n * w[None, :] * slope).to(dgate.dtype.element_ty), mask=inside)
            u *= act
        dw += u * n
        u *= w[None, :]
        mean = tl.sum(u * n, 1) / D
        tl.store(dx + at, ((u - n * mean[:, None]) * r[:, None]).to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dw, 0), mask=d < D)


@triton.jit(do_not_specialize=["P"])
def total(
    parts, dweight, dbias, P, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):
    """Over P of parts [P, ROWS, D], always in the same order: dweight [D, W], and of the row behind them dbias [D]."""
    w, d, p = tl.program_id(1), tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BP)
    inside, sums = d < D, tl.zeros([BP, BD], tl.float32)
    for first in range(0, P, BP):
        at = parts + ((first + p).to(tl.int64)[:, None] * ROWS + w) * D + d[None, :]
        sums += tl.load(at, mask=(first + p < P)[:, None] & inside[None, :], other=0.0)
    result = tl.sum(sums, 0)
    tl.store(dweight + d * W + w, result.to(dweight.dtype.element_ty), mask=inside & (w < W))
    if dbias is not None:
        tl.store(dbias + d, result.to(dbias.dtype.element_ty), mask=inside & (w == W))
