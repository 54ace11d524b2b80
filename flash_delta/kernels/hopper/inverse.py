"""The inverse of a chunk by one warp group, in registers but for three exchanges: A = (I - M)^-1, M strictly lower.

By doubling, as in ``triton/solve.py``: with A the inverses of the blocks of s tokens on the diagonal, those of 2 s are
``A + A M A``, of M only what lies between the halves, so that nothing is ever larger than the inverse. Warp w holds
rows 16 w to 16 w + 15. Up to 16 tokens every warp works on its own block, ``[4, 16, 16]``, with mma; small matrices
come with their transposes, for what a product leaves of B^T is, register for register, what a product takes for B. The
last doubling is two wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flash_delta.kernels.hopper.layouts import BLOCKS, NARROW_ROWS, ROWS
from flash_delta.kernels.hopper.names import barrier


@gluon.jit
def product(a, bt, c):
    """``c + a b`` of [4, 16, 16] in float16, with b given by its transpose."""
    x = gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, BLOCKS, 2))
    y = gl.convert_layout(gl.permute(bt.to(gl.float16), [0, 2, 1]), gl.DotOperandLayout(1, BLOCKS, 2))
    return mma_v2(x, y, c)


@gluon.jit
def doubled(A, At, M, r, c, level: gl.constexpr):
    """From the inverses of the blocks of ``2^level`` tokens, and their transposes, those of twice as many."""
    below = gl.where(((r >> level) ^ (c >> level)) == 1, M, 0.0)
    step = product(At, below, gl.zeros([4, 16, 16], gl.float32, BLOCKS))  # (below A)^T
    return product(A, step, A), product(step, A, At)


@gluon.jit
def invert(M, sM, sT, sD):
    """M [64, 64] float32, in registers as ROWS; A likewise. Scratch: sM, sT [64, 64], sD [2, 2, 16, 16], float16.

    All threads have to have left the scratch memory, and leave it with a barrier to come.
    """
    sM.store(M.to(gl.float16))
    M4 = M.reshape([4, 16, 4, 16])
    layout: gl.constexpr = M4.type.layout
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    block_row = gl.arange(0, 4, layout=row)[:, None, None, None]
    block_column = gl.arange(0, 4, layout=column)[None, None, :, None]
    own, before = block_row == block_column, block_row == block_column + 1
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    D = gl.convert_layout(gl.sum(gl.where(own, M4, 0.0), 2), BLOCKS)
    B = gl.convert_layout(gl.sum(gl.where(before, M4, 0.0), 2), BLOCKS)  # the block left of a warp's own
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    eye = zero + gl.where(r == c, 1.0, 0.0)
    A = gl.where((r ^ c) == 1, D, eye)
    At = product(eye, A, zero)
    for level in gl.static_range(1, 4):
        A, At = doubled(A, At, D, r, c, level)
    # 16 -> 32: a warp of odd number needs the transposed inverse of the warp before it.
    pairs = At.to(gl.float16).reshape([2, 2, 16, 16])
    sD.store(pairs)
    barrier()
    At_before = gl.broadcast(sD.slice(0, 1, 1).load(pairs.type.layout), pairs)[0]
    At_before = gl.convert_layout(At_before.reshape([4, 16, 16]), BLOCKS)
    odd = (gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS))) % 2 == 1)[:, None, None]
    B = gl.where(odd, product(A, product(At_before, B, zero), zero), 0.0)
    A4 = gl.where(own, gl.convert_layout(A, gl.SliceLayout(2, layout)).expand_dims(2), 0.0)
    A4 += gl.where(before, gl.convert_layout(B, gl.SliceLayout(2, layout)).expand_dims(2), 0.0)
    A = gl.convert_layout(A4.reshape([64, 64]), ROWS)
    # 32 -> 64: rows 32 on, columns up to 31.
    half = A.to(gl.float16)
    sT.store(half)
    fence_async_shared()
    barrier()
    step = warpgroup_mma(
        gl.convert_layout(half, gl.DotOperandLayout(0, NARROW_ROWS, 2)), sM.slice(0, 32, 1),
        gl.zeros([64, 32], gl.float32, NARROW_ROWS), use_acc=False, is_async=True,
    )  # fmt: skip
    step = warpgroup_mma_wait(0, deps=[step])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    step = gl.where(rows >= 32, step, 0.0).to(gl.float16)
    A = warpgroup_mma(gl.convert_layout(step, gl.DotOperandLayout(0, ROWS, 2)), sT.slice(0, 32, 0), A, is_async=True)
    return warpgroup_mma_wait(0, deps=[A])
