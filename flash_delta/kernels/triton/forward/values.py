"""The values that tokens write: v, or w . v with a strength per channel.

In the forward pass `channel` writes W = w . v for the scans, because the tiles of a scan with output leave no memory
for tiles of w (docs/notes). In the backward pass scans load w beside v, and nobody writes W.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_of
from flash_delta.kernels.device.chunk import load_tile, matrix, rows_of, store_tile
from flash_delta.kernels.runtime.plan import Layout, Making
from flash_delta.problem import Problem


@triton.jit
def write_values(
    v, w, W, v_strides, w_strides, token, stop, row, hv, T, HV, V: tl.constexpr, C: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Writes w . v of the tokens of a chunk."""
    strides = (T.to(tl.int64) * HV * V, HV * V, V, 1)
    v, w, W = rows_of(v, v_strides, row, hv), rows_of(w, w_strides, row, hv), rows_of(W, strides, row, hv)
    for column in range(0, V, 64):
        values = load_tile(v, v_strides, token, stop, column, V, C, 64).to(tl.float32)
        values *= strength_of(load_tile(w, w_strides, token, stop, column, V, C, 64), 1.0, RAW)
        store_tile(W, strides, values.to(W.dtype.element_ty), token, stop, column, V, C, 64)


@triton.jit
def value_rows(
    v, w, v_strides, w_strides, row, hv, stop, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """v of one head, and w if there is one, for `load_values`. They are as ``matrix`` returns them."""
    vs = matrix(rows_of(v, v_strides, row, hv), v_strides, stop, V, C, BV, TMA)
    if w is None:
        return (vs,)
    else:
        return vs, matrix(rows_of(w, w_strides, row, hv), w_strides, stop, V, C, BV, TMA)


@triton.jit
def load_values(
    rows, v_strides, w_strides, token, stop, column, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    TMA: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """The values of a chunk in float32, [BV, C]. ``rows``: see `value_rows`."""
    values = tl.trans(load_tile(rows[0], v_strides, token, stop, column, V, C, BV, TMA)).to(tl.float32)
    if len(rows) > 1:
        gates = tl.trans(load_tile(rows[1], w_strides, token, stop, column, V, C, BV, TMA))
        values *= strength_of(gates, 1.0, RAW)
    return values


def values_of(made: Making, p: Problem) -> Layout:
    """Makes memory for W. Packed sequences are one row. Its stride is 0, so that no length changes compiled code."""
    t = made.new("w . v", (p.B, p.T, p.HV, p.V), p.dtype)
    return Layout(t.shape, (0, *t.strides[1:]), t.dtype, name=t.name) if p.packed else t
