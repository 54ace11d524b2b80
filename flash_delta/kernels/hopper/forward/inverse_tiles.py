"""A of a chunk in shared memory, and products with it.

A is lower triangular. Of its four blocks of 32 x 32 tokens, three are kept, in three tiles of [64, 32]:

    tile 0    the two blocks on the diagonal
    tile 1    rows 0 to 31: the block below them
    tile 2    with tile 1, rows 32 to 63: what the blocks on the diagonal and the one below lose by rounding

If no beta of the chunk is above 1, the lost parts are neither stored nor used. Otherwise keys that repeat make A nearly
Toeplitz: the entries of a diagonal are all rounded in the same way, and R is the same in every row, so that errors add
up over the 2,016 entries, and states grow without bound (docs/mathematics.md, section 8).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flash_delta.kernels.hopper.forward.state_copies import apart, beside
from flash_delta.kernels.hopper.gluon_compat import tma_load, tma_store
from flash_delta.kernels.hopper.layouts import NARROW_ROWS, ROWS, C
from flash_delta.kernels.hopper.rings import rate

TILES = gl.constexpr(3)
BYTES = gl.constexpr(3 * 64 * 32 * 2)


@gluon.jit
def is_fine(sr, s):
    """Whether the chunk in slot s of the rates has a beta above 1, so that A is kept in two parts."""
    return gl.max(gl.max(rate(sr, s, 7).slice(1, 1, 1).load(ROWS), 1), 0) > 1.0


@gluon.jit
def put_inverse(sa, x, diagonal, below, fine):
    """Stores A in slot x of ``sa``: the blocks on its diagonal, and the block below them, which ``below`` has twice."""
    ty: gl.constexpr = sa.dtype
    d, b = diagonal.to(ty), below.to(ty)
    sa.index(TILES * x).store(d)
    if fine:
        first = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None] < 32
        sa.index(TILES * x + 1).store(gl.where(first, b, (below - b.to(gl.float32)).to(ty)))
        sa.index(TILES * x + 2).store((diagonal - d.to(gl.float32)).to(ty))
    else:
        sa.index(TILES * x + 1).store(b)


@gluon.jit
def store_inverse(desc, index, sa, x, fine):
    """Starts the copy of A from slot x to memory, where it is number ``index``. Returns how many tiles it copies."""
    at = index * (TILES * C)
    tma_store(desc, [at, 0], sa.index(TILES * x))
    tma_store(desc, [at + C, 0], sa.index(TILES * x + 1))
    if fine:
        tma_store(desc, [at + 2 * C, 0], sa.index(TILES * x + 2))


@gluon.jit
def load_inverse(desc, index, bar, sa, x):
    """Starts the copy of all tiles of A from memory, which are BYTES."""
    at = index * (TILES * C)
    for n in gl.static_range(TILES):
        tma_load(desc, [at + C * n, 0], bar, sa.index(TILES * x + n))


@gluon.jit
def halves(R):
    """R^T [64, 64] as two operands of `times_inverse`."""
    operand: gl.constexpr = gl.DotOperandLayout(0, NARROW_ROWS, 2)
    first, second = apart(R)
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand)


@gluon.jit
def times_inverse(R, sa, x):
    """Starts three products, which make U^T = R^T A^T with the larger parts of A. Returns tokens 0 to 31 and tokens 32
    to 63, each [64, 32]."""
    first, second = R
    zero = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    own, below = sa.index(TILES * x), sa.index(TILES * x + 1)
    left = warpgroup_mma(first, own.slice(0, 32, 0).permute([1, 0]), zero, use_acc=False, is_async=True)
    right = warpgroup_mma(first, below.slice(0, 32, 0).permute([1, 0]), zero, use_acc=False, is_async=True)
    right = warpgroup_mma(second, own.slice(32, 32, 0).permute([1, 0]), right, is_async=True)
    return left, right


@gluon.jit
def transposed_product(R, sa, x, own: gl.constexpr, part: gl.constexpr, left, right, ADD: gl.constexpr):
    first, second = R
    own, below = sa.index(TILES * x + own), sa.index(TILES * x + 1).slice(32 * part, 32, 0)
    left = warpgroup_mma(first, own.slice(0, 32, 0), left, use_acc=ADD, is_async=True)
    left = warpgroup_mma(second, below, left, is_async=True)
    right = warpgroup_mma(second, own.slice(32, 32, 0), right, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(0, deps=[left, right])


@gluon.jit
def times_transposed_inverse(R, sa, x, fine):
    """dU^T A [64, 64], from `halves` of dU^T."""
    zero = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    left, right = transposed_product(R, sa, x, 0, 0, zero, zero, False)
    if fine:
        left, right = transposed_product(R, sa, x, 2, 1, left, right, True)
    return gl.convert_layout(beside(left, right), ROWS)


@gluon.jit
def finished(R, left, right, sa, x, fine):
    """U^T [64, 64], from what `times_inverse` has started."""
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    if fine:
        first, second = R
        own, below = sa.index(TILES * x + 2), sa.index(TILES * x + 1)
        left = warpgroup_mma(first, own.slice(0, 32, 0).permute([1, 0]), left, is_async=True)
        right = warpgroup_mma(first, below.slice(32, 32, 0).permute([1, 0]), right, is_async=True)
        right = warpgroup_mma(second, own.slice(32, 32, 0).permute([1, 0]), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return gl.convert_layout(beside(left, right), ROWS)
