"""Products with the inverse A of a chunk.

If the inputs have 16 bits, A is float16. Rounding errors of A add up where keys repeat, since all its entries then have
similar errors. In bfloat16 they let a state grow that should shrink. The other factor of such a product is float16,
too. It may have any range, so it is counted in units that are powers of two. Neither the division by a unit nor the
multiplication afterwards rounds anything.
"""

import triton
import triton.language as tl

EXPONENT = tl.constexpr(0xFF << 23)  # the bits of a float32 that hold its exponent
BELOW = tl.constexpr(14 << 23)  # a unit is smaller than the largest number by 2^14
LEAST_UNIT = tl.constexpr(2 << 23)  # the least unit, whose inverse is finite
ONE = tl.constexpr(127 << 23)  # the bits of 1


@triton.jit
def unit_of(largest):
    """A power of two that is at most 2^-14 of ``largest`` (float32, not below 0), and its inverse.

    Numbers of up to ``largest`` are below 2^15 in this unit, and float16 holds them. Both powers are finite and not 0,
    whatever ``largest`` is.
    """
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) & EXPONENT) - BELOW, LEAST_UNIT)
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def dither(x, step):
    """A number from 1 to 2 from two bfloat16 numbers, ``step`` apart. Others give another one, by chance."""
    high, low = tl.load(x).to(tl.int16, bitcast=True), tl.load(x + step).to(tl.int16, bitcast=True)
    fraction = ((high.to(tl.int32) & 0x7F) << 16) | ((low.to(tl.int32) & 0x7F) << 9)
    return (fraction | ONE).to(tl.float32, bitcast=True)


@triton.jit
def load_dither(rates, head, C: tl.constexpr, DITHERED: tl.constexpr):
    """What `factor` has multiplied X and Y of a chunk by, or 1 if nothing is DITHERED."""
    if DITHERED:
        return tl.load(rates + head * (4 * C) + 3 * C + 1)
    else:
        return 1.0


@triton.jit
def times_inverse(x, a, UNIT_DIAGONAL: tl.constexpr, PRECISION: tl.constexpr, by=1.0):
    """``x a by`` in float32, for x [rows, C] in float32. UNIT_DIAGONAL: a lacks its diagonal, which is 1."""
    if a.dtype == tl.float16:
        unit, inverse = unit_of(tl.max(tl.abs(x), 1))
        x *= inverse[:, None]
        return tl.dot(x.to(tl.float16), a, x if UNIT_DIAGONAL else None) * (unit * by)[:, None]
    else:
        return tl.dot(x, a, x if UNIT_DIAGONAL else None, input_precision=PRECISION) * by
