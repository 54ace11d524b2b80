"""W = w . v, the values that tokens write with a strength per channel. `channel` writes them for the scans."""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_of
from flash_delta.kernels.device.chunk import load_tile, rows_of, store_tile
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


def values_of(made: Making, p: Problem) -> Layout:
    """Makes memory for W. Packed sequences are one row. Its stride is 0, so that no length changes compiled code."""
    t = made.new("w . v", (p.B, p.T, p.HV, p.V), p.dtype)
    return Layout(t.shape, (0, *t.strides[1:]), t.dtype, name=t.name) if p.packed else t
