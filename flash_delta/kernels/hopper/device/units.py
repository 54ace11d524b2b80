"""A and what it is multiplied by, in float16.

A is rounded once, when it is stored. Where keys repeat, its entries are much alike, and their rounding errors add up.
So A is kept in float16, which is finer than bfloat16, and has the range that A needs. What A is multiplied by may have
any size. So each of its rows is counted in a power of two, its *unit*. This rounds nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EXPONENT = gl.constexpr(255 << 23)  # bits of float32
LIFT = gl.constexpr(14 << 23)  # in a unit the largest number of a row is 2^14 or more, but below 2^15
LEAST_UNIT = gl.constexpr(15 << 23)  # smaller rows have the same unit, 2^-126
INVERSE = gl.constexpr(254 << 23)  # less the exponent of a number's bits: those of the inverse


@gluon.jit
def units(x):
    """The unit of each row of x (float32), and its inverse: [rows, 1]. Both are normal numbers, whatever is in x."""
    bits = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) & EXPONENT
    bits = gl.maximum(bits, LEAST_UNIT)[:, None] - LIFT
    return bits.to(gl.float32, bitcast=True), (INVERSE - bits).to(gl.float32, bitcast=True)


@gluon.jit
def to_half(A):
    """A in float16. Numbers beyond its range become its largest ones."""
    if A.dtype == gl.float32:
        code: gl.constexpr = "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;"
        A = gl.inline_asm_elementwise(code, "=r,f,f", [A], gl.float16, True, 2)
    return A
