"""Products with the inverse A of a chunk.

If the inputs have 16 bits, A is float16. Rounding errors of A add up where keys repeat, since all its entries then have
similar errors. In bfloat16 they let a state grow that should shrink. The other factor of such a product is float16,
too. It may have any range, so it is counted in units that are powers of two. Neither the division by a unit nor the
multiplication afterwards rounds anything.
"""

import triton
import triton.language as tl

# The bits of a float32 below its exponent, and of exponents: of 2^14, and of the least and the largest unit.
SHIFT = tl.constexpr(23)
LIFT, LEAST_BITS, MOST_BITS = tl.constexpr(14 << 23), tl.constexpr(16 << 23), tl.constexpr(250 << 23)


@triton.jit
def unit_of(largest):
    """A power of two that is at most 2^-14 of ``largest`` (float32, not below 0), and its inverse.

    Numbers of up to ``largest`` are below 2^15 in this unit, and float16 holds them. Both powers are finite and not 0,
    whatever ``largest`` is.
    """
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, LEAST_BITS), MOST_BITS) - LIFT
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def times_inverse(x, a, UNIT_DIAGONAL: tl.constexpr, PRECISION: tl.constexpr):
    """``x a`` in float32, for x [rows, C] in float32. UNIT_DIAGONAL: a lacks its diagonal, which is 1."""
    if a.dtype == tl.float16:
        unit, inverse = unit_of(tl.max(tl.abs(x), 1))
        x *= inverse[:, None]
        return tl.dot(x.to(tl.float16), a, x if UNIT_DIAGONAL else None) * unit[:, None]
    else:
        return tl.dot(x, a, x if UNIT_DIAGONAL else None, input_precision=PRECISION)
