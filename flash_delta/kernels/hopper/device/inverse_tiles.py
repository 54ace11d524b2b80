"""A of a chunk in shared memory, and products with it.

A is lower triangular. Of its four blocks of 32 x 32 tokens, three are kept, in tiles of [64, 32]:

    tile 0    the two blocks on the diagonal
    tile 1    rows 0 to 31: the block below them
    tile 2    with rows 32 to 63 of tile 1: what the three blocks lose by rounding. Only with FINE

Keys that repeat make A nearly Toeplitz. The entries of a diagonal are all rounded in the same way, and R is much the
same in every row. So errors add up over the 2,016 entries, and with a beta above 1 states grow without bound (section 8
of docs/mathematics.md). With FINE, a chunk that has such a beta gets back what was lost. Other chunks do not need it.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flash_delta.kernels.hopper.device.gluon_compat import tma_load, tma_store
from flash_delta.kernels.hopper.device.layouts import NARROW_ROWS, ROWS, C
from flash_delta.kernels.hopper.device.rings import rate
from flash_delta.kernels.hopper.device.state_copies import apart, beside
from flash_delta.kernels.hopper.device.units import to_half
from flash_delta.problem import Problem

STORED = gl.constexpr(3)  # tiles in memory
BYTES = gl.constexpr(64 * 32 * 2)  # of a tile
Inverse = namedtuple("Inverse", "diagonal below rest")  # tiles 0, 1 and 2, or without FINE 1 again


def fine(p: Problem) -> bool:
    """Whether kernels keep A in two parts where a beta is above 1. On a pool they always do, since warm-up does not
    know what calls say of beta."""
    return p.pools is not None or p.most_beta > 1


@gluon.jit
def tiles_in(sa, x, FINE: gl.constexpr):
    """The tiles of slot x."""
    TILES: gl.constexpr = 3 if FINE else 2
    return Inverse(sa.index(TILES * x), sa.index(TILES * x + 1), sa.index(TILES * x + TILES - 1))


@gluon.jit
def is_fine(sr, s, FINE: gl.constexpr):
    """Whether the chunk in slot s of the rates has a beta above 1."""
    if FINE:
        return gl.max(gl.max(rate(sr, s, 7).slice(1, 1, 1).load(ROWS), 1), 0) > 1.0
    else:
        return False


@gluon.jit
def rounded(A, ty: gl.constexpr):
    if ty == gl.float16:
        return to_half(A)
    else:
        return A.to(ty)


@gluon.jit
def put_inverse(tiles, diagonal, below, fine):
    """Stores A: the two blocks on its diagonal, and the block below them, which ``below`` has twice."""
    ty: gl.constexpr = tiles.diagonal.dtype
    d, b = rounded(diagonal, ty), rounded(below, ty)
    tiles.diagonal.store(d)
    if fine:
        first = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None] < 32
        tiles.below.store(gl.where(first, b, (below - b.to(gl.float32)).to(ty)))
        tiles.rest.store((diagonal - d.to(gl.float32)).to(ty))
    else:
        tiles.below.store(b)


@gluon.jit
def store_inverse(desc, index, tiles, fine):
    """Starts the copies of A to memory, where it is number ``index``."""
    at = index * (STORED * C)
    tma_store(desc, [at, 0], tiles.diagonal)
    tma_store(desc, [at + C, 0], tiles.below)
    if fine:
        tma_store(desc, [at + 2 * C, 0], tiles.rest)


@gluon.jit
def load_inverse(desc, index, bar, tiles, FINE: gl.constexpr):
    """Starts the copies of A from memory: three tiles with FINE, otherwise two."""
    for n in gl.static_range(3 if FINE else 2):
        tma_load(desc, [index * (STORED * C) + n * C, 0], bar, tiles[n])


@gluon.jit
def halves(R):
    """R^T [64, 64] as two operands of the products below."""
    operand: gl.constexpr = gl.DotOperandLayout(0, NARROW_ROWS, 2)
    first, second = apart(R)
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand)


@gluon.jit
def product(R, own, below, left, right, ADD: gl.constexpr):
    """Starts three products, which make U^T = R^T A^T, or with ADD add to it: [64, 32] for tokens 0 to 31, and the same
    for tokens 32 to 63."""
    first, second = R
    left = warpgroup_mma(first, own.slice(0, 32, 0).permute([1, 0]), left, use_acc=ADD, is_async=True)
    right = warpgroup_mma(first, below.permute([1, 0]), right, use_acc=ADD, is_async=True)
    right = warpgroup_mma(second, own.slice(32, 32, 0).permute([1, 0]), right, is_async=True)
    return left, right


@gluon.jit
def times_inverse(R, tiles):
    """Starts `product` with the larger parts of A."""
    zero = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    return product(R, tiles.diagonal, tiles.below.slice(0, 32, 0), zero, zero, False)


@gluon.jit
def finished(R, left, right, tiles, fine):
    """U^T [64, 64], from what `times_inverse` has started."""
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    if fine:
        left, right = product(R, tiles.rest, tiles.below.slice(32, 32, 0), left, right, True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return gl.convert_layout(beside(left, right), ROWS)


@gluon.jit
def product_back(R, own, below, left, right, ADD: gl.constexpr):
    """dU^T A, as `product` returns it, but finished."""
    first, second = R
    left = warpgroup_mma(first, own.slice(0, 32, 0), left, use_acc=ADD, is_async=True)
    left = warpgroup_mma_wait(0, deps=[left])
    left = warpgroup_mma(second, below, left, is_async=True)
    right = warpgroup_mma(second, own.slice(32, 32, 0), right, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(0, deps=[left, right])


@gluon.jit
def times_inverse_back(R, tiles, fine):
    """dU^T A [64, 64], from `halves` of dU^T."""
    zero = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    left, right = product_back(R, tiles.diagonal, tiles.below.slice(0, 32, 0), zero, zero, False)
    if fine:
        left, right = product_back(R, tiles.rest, tiles.below.slice(32, 32, 0), left, right, True)
    return gl.convert_layout(beside(left, right), ROWS)
