"""The inverse of a chunk, by one warp group: A = (I - M)^-1, where M is strictly lower triangular.

Blocks on the diagonal are inverted by doubling, as in ``triton/forward/solve.py``. If A has the inverses of blocks of s
tokens, then ``A + A M A`` has the inverses of blocks of 2 s tokens. In this formula M is only the part that lies
between the two halves of a block. So no number gets larger than the inverse itself.

Warp w holds rows 16 w to 16 w + 15 in registers. Warps exchange numbers through three tiles in shared memory: sD, sM
and sT. Up to 16 tokens, every warp works on its own block of ``[4, 16, 16]``, with mma. It keeps these small matrices
together with their transposes, because a product leaves B^T in the registers where the next product needs B. The last
doubling is two wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret
from flash_delta.kernels.hopper.device.layouts import BLOCKS, NARROW_ROWS, ROW_HALF
from flash_delta.kernels.hopper.device.state_copies import apart
from flash_delta.kernels.hopper.device.units import to_half


@gluon.jit
def product(a, bt, c):
    """``c + a b`` of [4, 16, 16] with float16 factors. ``bt`` is b transposed."""
    x = gl.convert_layout(to_half(a), gl.DotOperandLayout(0, BLOCKS, 2))
    y = gl.convert_layout(gl.permute(to_half(bt), [0, 2, 1]), gl.DotOperandLayout(1, BLOCKS, 2))
    return mma_v2(x, y, c)


@gluon.jit
def doubled(A, At, M, r, c, level: gl.constexpr):
    """The inverses of blocks of 2^(level + 1) tokens and their transposes, from those of 2^level tokens."""
    below = gl.where(((r >> level) ^ (c >> level)) == 1, M, 0.0)
    step = product(At, below, gl.zeros([4, 16, 16], gl.float32, BLOCKS))  # (below A)^T
    return product(A, step, A), product(step, A, At)


@gluon.jit
def own_blocks(M):
    """Returns every warp's block of M [64, 64] on the diagonal, and the block to the left of it. Warp 0 has no block to
    the left, and gets its own block again."""
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
    """[64, 32] from blocks [4, 16, 16]. Odd warps have ``odd_left`` and ``right``, even warps ``even_left`` and 0."""
    left = gl.where(odd, odd_left, even_left)
    right = gl.where(odd, right, 0.0)
    both = gl.join(left, right).permute([0, 1, 3, 2]).reshape([64, 32])
    return gl.convert_layout(both, NARROW_ROWS)


@gluon.jit
def invert_blocks(D, sD):
    """The inverse of each warp's block. The block's diagonal and what is above are ignored. The transposed inverses go
    to sD. The caller needs a barrier before `invert_pairs` reads them."""
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    D = gl.where(r > c, D, 0.0)
    eye = zero + gl.where(r == c, 1.0, 0.0)
    A = gl.where((r ^ c) == 1, D, eye)
    At = product(eye, A, zero)
    for level in gl.static_range(1, 4):
        A, At = doubled(A, At, D, r, c, level)
    sD.store(to_half(At).reshape([2, 2, 16, 16]))
    return A


@gluon.jit
def invert_pairs(A, own, B, sD):
    """The rows [64, 32] of the inverses of two blocks of 32, from the inverses of blocks of 16. An odd warp needs the
    transposed inverse of the warp before it. B: for odd warps, the block to the left of their own. ``own``: A, or what
    the result is to have in its place."""
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    pairs = A.reshape([2, 2, 16, 16])
    before = gl.broadcast(sD.slice(0, 1, 1).load(pairs.type.layout), pairs.to(gl.float16))[0]
    before = gl.convert_layout(before.reshape([4, 16, 16]), BLOCKS)
    odd = (gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS))) % 2 == 1)[:, None, None]
    return halves(odd, own, product(A, product(before, B, zero), zero), own)


@gluon.jit
def invert(M, sM, sT, sD):
    """A in registers: the two blocks of 32 tokens on the diagonal, [64, 32], and twice the block below them, [64, 32].

    M: [64, 64] with layout ROWS. Its diagonal and what is above are ignored.
    sM, sT [64, 32] and sD [2, 2, 16, 16]: float16 scratch. Before the call all warps must have left it. When the call
    returns, some warps may still use it. So the caller needs a barrier before it writes there.
    """
    sM.store(to_half(gl.convert_layout(apart(M)[0], NARROW_ROWS)))
    D, B = own_blocks(M)
    A = invert_blocks(D, sD)
    barrier()  # all warps of this group: their transposed inverses are in sD
    A = invert_pairs(A, A, B, sD)  # warps 0, 1: columns 0 to 31; 2, 3: 32 to 63
    # From blocks of 32 to 64: the block below is still missing.
    fine = to_half(A)
    three = fine.reshape([2, 32, 32])
    sT.store(fine)
    fence_async_shared()
    barrier()  # all warps of this group: sM and sT are there
    operand: gl.constexpr = gl.DotOperandLayout(0, NARROW_ROWS, 2)
    none = gl.zeros([64, 32], gl.float32, NARROW_ROWS)
    both = reinterpret(sT, gl.float16, [2, 32, 32], ROW_HALF)
    step = gl.broadcast(both.slice(1, 1, 0).load(three.type.layout), three)[0].reshape([64, 32])
    step = warpgroup_mma(gl.convert_layout(step, operand), sM.slice(32, 32, 0), none, use_acc=False, is_async=True)
    step = warpgroup_mma_wait(0, deps=[step])
    step = gl.convert_layout(to_half(step), operand)
    below = warpgroup_mma(step, sT.slice(0, 32, 0), none, use_acc=False, is_async=True)
    below = warpgroup_mma_wait(0, deps=[below])
    return A, below
