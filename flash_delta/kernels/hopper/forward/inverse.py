"""The inverse of a chunk by one warp group, in registers but for three exchanges: A diag(b), A = (I - M)^-1, M strictly
lower.

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

from flash_delta.kernels.hopper.forward.state_copies import apart
from flash_delta.kernels.hopper.gluon_compat import barrier
from flash_delta.kernels.hopper.layouts import BLOCKS, NARROW_ROWS


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
def own_blocks(M):
    """Of M [64, 64] the block on the diagonal and the one left of it (of warp 0 whatever), each in its warp."""
    even, odd = M.reshape([4, 16, 2, 2, 16]).permute([0, 1, 4, 2, 3]).split()  # columns of blocks 0 and 2, 1 and 3
    first, third = even.split()
    second, fourth = odd.split()
    first, second = gl.convert_layout(first, BLOCKS), gl.convert_layout(second, BLOCKS)
    third, fourth = gl.convert_layout(third, BLOCKS), gl.convert_layout(fourth, BLOCKS)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
    own = gl.where(w < 2, gl.where(w == 0, first, second), gl.where(w == 2, third, fourth))
    return own, gl.where(w < 2, first, gl.where(w == 2, second, third))


@gluon.jit
def halves(odd, even_left, odd_left, right):
    """[4, 16, 16] thrice to [64, 32]: of the rows of an odd warp ``odd_left`` and ``right``, of others the first, 0."""
    left = gl.where(odd, odd_left, even_left)
    right = gl.where(odd, right, 0.0)
    both = gl.join(left, right).permute([0, 1, 3, 2]).reshape([64, 32])
    return gl.convert_layout(both, NARROW_ROWS)


@gluon.jit
def invert(M, b, sM, sT, sD, KEEP: gl.constexpr):
    """A diag(b), as columns 0 to 31 and 32 to 63 [64, 32] in registers; M [64, 64] as ROWS, whose diagonal is ignored.

    With KEEP, A. b: [1, 64] in shared memory. Scratch: sM, sT [64, 32], sD [2, 2, 16, 16], float16, which all threads
    have to have left; there is a barrier to come when this returns.
    """
    sM.store(gl.convert_layout(apart(M)[0], NARROW_ROWS).to(gl.float16))
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    D, B = own_blocks(M)
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    D = gl.where(r > c, D, 0.0)
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
    A = halves(odd, A, product(A, product(At_before, B, zero), zero), A)  # of warps 0 and 1 columns 0 to 31, then 32 on
    # 32 -> 64: rows 32 on, columns up to 31.
    upper = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None] < 32
    scaled = A if KEEP else A * b.slice(0, 32, 1).load(NARROW_ROWS)
    sT.store(scaled.to(gl.float16))
    fence_async_shared()
    barrier()
    operand: gl.constexpr = gl.DotOperandLayout(0, NARROW_ROWS, 2)
    none = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    step = gl.convert_layout(A.to(gl.float16), operand)
    step = warpgroup_mma(step, sM.slice(32, 32, 0), none, use_acc=False, is_async=True)
    right = A * gl.where(upper, 0.0, 1.0 if KEEP else b.slice(32, 32, 1).load(NARROW_ROWS))
    step = warpgroup_mma_wait(0, deps=[step])
    step = gl.convert_layout(step.to(gl.float16), operand)
    below = warpgroup_mma(step, sT.slice(0, 32, 0), none, use_acc=False, is_async=True)
    below = warpgroup_mma_wait(0, deps=[below])
    return gl.where(upper, scaled, below), right
