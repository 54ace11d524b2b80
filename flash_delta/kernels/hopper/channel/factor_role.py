"""The role that makes A and P of 32 tokens, from the rows and columns of `gate_role`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_delta.kernels.hopper.channel.gate_role import is_last
from flash_delta.kernels.hopper.channel.parts import STEP, find_part
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.inverse import invert_blocks, invert_pairs
from flash_delta.kernels.hopper.device.layouts import BLOCKS, NARROW_ROWS
from flash_delta.kernels.hopper.device.work_items import find_pieces


@gluon.jit
def invert_own(scores, norms, strengths, sD):
    """Returns the inverses of blocks of 16, the blocks to the left of them, and weighted scores, which are P in the
    rows of q. ``scores`` [64, 32]: of k with k, and below of q with k."""
    P = scores * norms.permute([1, 0]).load(NARROW_ROWS) * norms.slice(0, STEP, 1).load(NARROW_ROWS)
    M = P * (strengths.permute([1, 0]).load(NARROW_ROWS) * -1.0)
    even, odd = M.reshape([4, 16, 2, 16]).permute([0, 1, 3, 2]).split()
    even, odd = gl.convert_layout(even, BLOCKS), gl.convert_layout(odd, BLOCKS)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
    return invert_blocks(gl.where(w % 2 == 0, even, odd), sD), even, P


@gluon.jit
def mixed(A, P, of_A):
    """A in float16, as `to_half` rounds it, where ``of_A``. Elsewhere the bits of P in bfloat16."""
    code: gl.constexpr = """{
        .reg .pred p;
        .reg .b32 a, b;
        setp.ne.s32 p, $5, 0;
        cvt.rn.satfinite.f16x2.f32 a, $2, $1;
        cvt.rn.bf16x2.f32 b, $4, $3;
        selp.b32 $0, a, b, p;
    }"""
    return gl.inline_asm_elementwise(code, "=r,f,f,f,f,r,r", [A, P, of_A.to(gl.int32)], gl.float16, True, 2)


@gluon.jit
def store_maps(inverted, tile, sD):
    """Stores A without its diagonal, and below it P: [64, 32]."""
    A, left, P = inverted
    row = gl.arange(0, 2 * STEP, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    P = gl.where(column <= row - STEP, P, 0.0)
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    A = invert_pairs(A, A - gl.where(r == c, 1.0, 0.0), left, sD)
    tile.store(mixed(A, P, row < STEP))


@gluon.jit
def factor_role(sD, made, bars, work, HV, BOUNDED: gl.constexpr):
    """Makes A and P. ``made``: `StepFactors`. sD: as in `invert`."""
    NX: gl.constexpr = made.rows.shape[0]
    zero = gl.zeros([2 * STEP, STEP], gl.float32, NARROW_ROWS)
    t = 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        part = find_part(piece, pieces, work, HV)
        token = part.first
        while token < part.end:
            x = t % NX
            mbarrier.wait(bars.tiled.index(x), (t // NX) & 1)  # signalled by the gate group: rows and columns are there
            scores = warpgroup_mma(
                made.rows.index(x), made.columns.index(x).permute([1, 0]), zero, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            inverted = invert_own(scores, made.norms.index(x), made.strengths.index(x), sD)
            barrier()  # all warps of the factor group: transposed inverses are there
            store_maps(inverted, made.maps.index(x), sD)
            fence_async_shared()
            if BOUNDED:
                token += STEP
            else:
                token += gl.where(is_last(made.flags.index(x)), STEP, 0)
            mbarrier.arrive(bars.ready.index(x), count=1)
            t += 1
