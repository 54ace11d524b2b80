"""The sum over programs, for gradients of parameters."""

import triton
import triton.language as tl

from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Layout, Step


@triton.jit(do_not_specialize=["P"])
def total(parts, dweight, dbias, P, D, W: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr):
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


TOTAL = Tile(4, 1, 16)
SUMMED = 128  # rows in a step of ``total``


def sum_parts(parts: Layout, dweight: Layout, dbias: Layout | None = None) -> Step:
    """``parts`` [P, rows, D] to dweight [D, W], and with one more row to dbias [D]."""
    P, rows, D = parts.shape
    constants = {"W": rows - (dbias is not None), "ROWS": rows, "BP": SUMMED, "BD": TOTAL.BV}
    return Step(total, (-(-D // TOTAL.BV), rows, 1), TOTAL, (parts, dweight, dbias, P, D), constants)
