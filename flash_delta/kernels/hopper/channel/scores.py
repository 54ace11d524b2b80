"""Scores of a chunk with a decay per channel, by wgmma, and the layouts of its numbers in registers and shared memory.

``P_ij = sum_c q_ic e^{G_ic - G_jc} k_jc``. L is the same with k for q. The decay is taken apart at r: rows are decayed
from r, and columns up to r. Rows come in blocks of 16 tokens, and r is G before a block. For columns before the block
no factor is above 1 if no log decay is above 0. Within the block the factors of columns are up to e^80, with a bound of
-5. Then rows are multiplied by e^40 and columns by e^-40, so that both stay well within what bfloat16 holds.

A chunk is done in two halves of 32 tokens. The rows of a half are 16 q, 16 q, 16 k, 16 k, a block for each warp. There
are these columns:

* ``own``: k up to the start of its own block.
* ``near``: k up to the end of its own block, for the next block.
* ``far``: k of the first half, up to the starts of blocks 2 and 3 of the chunk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from flash_delta.kernels.hopper.device.layouts import BLOCKS, NARROW_ROWS, ROWS, THREADS, C
from flash_delta.kernels.hopper.device.state_copies import apart

K = gl.constexpr(128)
# In registers. A thread owns all 16 tokens of two channels, so that sums over tokens need no other thread.
OWN = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))  # [2, 16, 128]: a half
WARPS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # 16 rows a warp
EIGHTS = gl.constexpr(  # [32, 128], 8 rows per warp. Two such tiles are the 16 rows that a product takes
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 128],
    )
)
TOKENS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [2, 2], [1, 0]))  # [32, 128], the same numbers


@gluon.jit
def take(tile, h: gl.constexpr):
    """Half h of the tokens of a tile [64, 128]."""
    half = tile.slice(32 * h, 32, 0).load(TOKENS).reshape([2, 16, K])
    return gl.convert_layout(half, OWN).to(gl.float32)


@gluon.jit
def put(tile, h: gl.constexpr, x):
    tile.slice(32 * h, 32, 0).store(x.to(tile.dtype).reshape([32, K]))


@gluon.jit
def squared_lengths(x):
    """The squared lengths of the rows of x [4, 16, 128]: the diagonal of x x^T. A warp multiplies its own 16 rows."""
    rows = gl.convert_layout(x, gl.DotOperandLayout(0, BLOCKS, 2))
    columns = gl.convert_layout(gl.permute(x, [0, 2, 1]), gl.DotOperandLayout(1, BLOCKS, 2))
    squares = mma_v2(rows, columns, gl.zeros([4, 16, 16], gl.float32, BLOCKS))
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    return gl.sum(gl.where(r == c, squares, 0.0), 2)


@gluon.jit
def squared_lengths_of_two(first, second):
    """The squared lengths of the rows of two tiles [32, 128], as [2, 32]. A warp has 8 rows of each tile."""
    x = gl.join(first.load(EIGHTS), second.load(EIGHTS)).reshape([4, 8, K, 2]).permute([0, 3, 1, 2])
    return squared_lengths(x.reshape([4, 16, K])).reshape([4, 2, 8]).permute([1, 0, 2]).reshape([2, 32])


@gluon.jit
def reciprocal_lengths(tile):
    """``(sum x^2 + eps)^{-1/2}`` of 64 rows."""
    x = tile.load(gl.DotOperandLayout(0, WARPS, 2)).reshape([4, 16, K])
    return gl.rsqrt(gl.convert_layout(squared_lengths(x).reshape([C]), THREADS) + 1e-6)


@gluon.jit
def products(rows, columns):
    """Starts the product of rows [64, 128] with two sets of 32 columns."""
    zero = gl.zeros([C, C], gl.float32, ROWS)
    return warpgroup_mma(rows, columns.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def both(scores):
    """The result of `products`, apart for the two sets of columns."""
    left, right = apart(scores)
    return gl.convert_layout(left, NARROW_ROWS), gl.convert_layout(right, NARROW_ROWS)


@gluon.jit
def weighted(scores, h: gl.constexpr, columns: gl.constexpr, weights, norms, NORM: gl.constexpr):
    """Scores [64, 32] of the rows of half h with the 32 columns from ``columns`` on, times the weights of both."""
    scores *= weights.slice(h, 1, 0).permute([1, 0]).load(NARROW_ROWS)
    if NORM:
        scores *= norms.slice(columns, 32, 1).load(NARROW_ROWS)
    return scores


@gluon.jit
def near_scores(own, near):
    """The scores of a half with itself."""
    row = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    token = row % 32
    seen = column + row // 32 <= token  # q sees its own token, k does not
    same = token // 16 == column // 16
    return gl.where(seen, gl.where(same, own, near), 0.0)


@gluon.jit
def far_scores(second, third):
    """The scores of the second half with the first: from columns up to block 2, and from columns up to block 3."""
    row = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    return gl.where(row // 16 % 2 == 0, second, third)
