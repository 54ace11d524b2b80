"""The role that factors chunks in the loop: it writes A, and P if it READS. loop.py says which barriers it uses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret
from flash_delta.kernels.hopper.device.inverse import invert
from flash_delta.kernels.hopper.device.inverse_tiles import is_fine, put_inverse, store_inverse, tiles_in
from flash_delta.kernels.hopper.device.layouts import HALF, ROWS, C
from flash_delta.kernels.hopper.device.rings import rate, sees, wait_free
from flash_delta.kernels.hopper.device.segment_bounds import first_slot
from flash_delta.kernels.hopper.device.work_items import find_piece, find_pieces


@gluon.jit
def factor_role(
    sD, a_desc, tiles, bars, work, w, HV, which: gl.constexpr, FACTORS: gl.constexpr, READS: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """Factors every chunk whose number is ``which``, modulo FACTORS. ``tiles``: `ChunkTiles`. ``bars``: `Barriers`. sD:
    as in `invert`."""
    sq, sk, sr, sa, sp = tiles.q, tiles.k, tiles.rates, tiles.A, tiles.P
    full, done = bars.full, bars.done
    NS: gl.constexpr = sk.shape[0]
    NX: gl.constexpr = sp.shape[0]
    FINE: gl.constexpr = sa.shape[0] == 3 * NX
    ty: gl.constexpr = sk.dtype
    i = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, ROWS))[None, :]
    zero = gl.zeros([C, C], gl.float32, ROWS)
    first = 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        own = find_piece(piece, pieces, work, HV)
        chunks = (own.end - own.begin + C - 1) // C
        begin = (which + FACTORS - first % FACTORS) % FACTORS
        s = (first + begin) % NS
        # Signalled by the copy engine, and by the rate role if it makes rates: k, q and rates are there.
        mbarrier.wait(full.index(s), ((first + begin) // NS) & 1, pred=begin < chunks)
        scores = warpgroup_mma(sk.index(s), sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])  # still on its way
        for c in range(begin, chunks, FACTORS):
            t = first + c
            s, x = t % NS, t % NX
            decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))
            strength = rate(sr, s, 2).permute([1, 0]).load(ROWS)
            scores = warpgroup_mma_wait(0, deps=[scores])
            M = scores * decay * strength
            wait_free(done, t, NX, NS)  # signalled by the state groups, which have read the A and P in this slot
            if READS:
                reads = warpgroup_mma(sq.index(s), sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
                reads = warpgroup_mma_wait(0, deps=[reads])
                sp.index(x).store(gl.where(sees(i, j, STEPS), reads * decay, 0.0).to(ty))
            if a_desc is not None:
                tma.store_wait(NX // FACTORS - 1)  # the copy engine has read the A in this slot
            A = tiles_in(sa, x, FINE)
            sT = reinterpret(A.diagonal, gl.float16, [C, C // 2], HALF)
            sM = reinterpret(A.below, gl.float16, [C, C // 2], HALF)
            diagonal, below = invert(M, sM, sT, sD)
            barrier()  # all warps of this factor group: the last product of `invert` has read its scratch in this slot
            fine = is_fine(sr, s, FINE)
            put_inverse(A, diagonal, below, fine)
            fence_async_shared()
            mbarrier.arrive(bars.A_full.index(x), count=1)
            if a_desc is not None:
                barrier()  # all warps of this factor group: A is whole in shared memory
                if w == 0:  # two programs may scan the same state, and one of them writes
                    slot = first_slot(own.n, own.start, work.T, work.cu_seqlens is not None) + own.begin // C + c
                    store_inverse(a_desc, slot * HV + own.hv, A, fine)
            # Starts the scores of this group's next chunk. After the last chunk they come from old tiles, unused.
            later = t + FACTORS
            # Signalled by the copy engine, and by the rate role if it makes rates: k, q and rates are there.
            mbarrier.wait(full.index(later % NS), (later // NS) & 1, pred=c + FACTORS < chunks)
            keys = sk.index(later % NS)
            scores = warpgroup_mma(keys, keys.permute([1, 0]), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
        scores = warpgroup_mma_wait(0, deps=[scores])
        first += chunks
    if a_desc is not None:
        tma.store_wait(0)
