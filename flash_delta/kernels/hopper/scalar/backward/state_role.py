"""The role of `scan_gradients` that carries the gradient of the state, right to left (see scan.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_store
from flash_delta.kernels.hopper.device.hand_over import flag_of, hand_over, take_over
from flash_delta.kernels.hopper.device.inverse_tiles import halves, is_fine, tiles_in, times_inverse_back
from flash_delta.kernels.hopper.device.layouts import BOX, NARROW_ROWS, RAGGED, ROWS, TILE, C
from flash_delta.kernels.hopper.device.rings import rate, sees
from flash_delta.kernels.hopper.device.state_copies import apart_all, load_state, store_state
from flash_delta.kernels.hopper.device.work_items import find_pieces, find_run
from flash_delta.kernels.hopper.scalar.backward.memory import FIXED, GROUP, THROUGH, WRITES


@gluon.jit
def store_scores(q, k, sp, sl, sr, s, g_done, ph, m: gl.constexpr, GRADIENTS: gl.constexpr, STEPS: gl.constexpr):
    """Writes 32 columns of P and L, for the keys from m on."""
    ty: gl.constexpr = k.dtype
    i = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    j = m + gl.arange(0, 32, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    zero = gl.zeros([C, 32], gl.float32, NARROW_ROWS)
    keys = k.slice(m, 32, 0).permute([1, 0])
    P = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
    if GRADIENTS:
        L = warpgroup_mma(k, keys, zero, use_acc=False, is_async=True)
    decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(NARROW_ROWS) - rate(sr, s, 1).slice(m, 32, 1).load(NARROW_ROWS))
    if GRADIENTS:
        P, L = warpgroup_mma_wait(0, deps=[P, L])
        L = gl.where(i > j, L * decay * rate(sr, s, 2).permute([1, 0]).load(NARROW_ROWS), 0.0).to(ty)
    else:
        P = warpgroup_mma_wait(0, deps=[P])
    P = gl.where(sees(i, j, STEPS), P * decay, 0.0).to(ty)
    mbarrier.wait(g_done, ph ^ 1)  # signalled by those who read P and L: they have read the last ones
    sp.slice(m, 32, 1).store(P)
    if GRADIENTS:
        sl.slice(m, 32, 1).store(L)


@gluon.jit
def through_state(dS, before, v: gl.constexpr, WIDTH: gl.constexpr):
    """<S0, dS1> of every value column from v on, [64]. ``before``: S0 in shared memory."""
    parts, own = apart_all(dS, WIDTH // 32), before.slice(v, 64, 0)  # 32 columns at a time, as registers are few
    sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, NARROW_ROWS))
    for m in gl.static_range(WIDTH // 32):
        part = gl.convert_layout(parts[m], NARROW_ROWS)
        sums += gl.sum(part * own.slice(32 * m, 32, 1).load(NARROW_ROWS).to(gl.float32), 1)
    return sums


@gluon.jit
def state_role(
    sbar, dv_desc, descs, tiles, bars, lines, left, work, HV, g: gl.constexpr, ENDS: gl.constexpr,
    V_FIRST: gl.constexpr, GATE: gl.constexpr, LINES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """State group g, which has 64 value columns. ``descs``: `StateDescriptors`. ``tiles``: `ChunkTiles`. ``bars``:
    `BackBarriers`."""
    sk, sa, sds1, sr, after, start_desc = tiles.k, tiles.A, tiles.dS, tiles.rates, descs.initial, descs.final
    kq_full, p_ready, mid, g_done = bars.kq_full, bars.p_ready, bars.mid, bars.g_done
    GRADIENTS: gl.constexpr = dv_desc is not None
    WIDTH: gl.constexpr = sk.shape[2]
    GROUPS: gl.constexpr = WIDTH // 64
    FINE: gl.constexpr = sa.shape[0] == 3
    v: gl.constexpr = 64 * g
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([64, C], gl.float32, ROWS)
    pieces, earlier = find_pieces(work, HV), 0
    for piece in range(pieces.begin, pieces.end, pieces.step):
        hv, slot, run = find_run(piece, pieces, work, HV, True)
        n, size, chunks, number, last = run.n, run.size, run.chunks, run.number, run.last
        row = run.row * work.T + run.start + size
        own = sds1.index(g)  # [64, WIDTH]: whole states are also copied through it
        copies = reinterpret(own, ty, [WIDTH // 64, 64, 64], TILE)
        needed, faded = chunks > 0, chunks * 0 > 0
        if not GRADIENTS:
            needed = needed & (number > 0)  # nobody needs the result of a sequence's first segment
            faded = left < chunks
            chunks = gl.minimum(chunks, left)
        gdc_wait()  # the kernels before this one have ended, so that this one may read their results and write
        if (chunks > 0) | last:
            dS = gl.zeros([64, WIDTH], gl.float32, WIDE)
            if work.tape is not None:
                mbarrier.wait(mid, (earlier & 1) ^ 1)  # signalled by all: they have read the last dS
            if ENDS:
                dS = load_state(after, None, (slot * HV + hv) * WIDTH, v, copies, sbar, WIDTH, True, WIDTH // 64, WIDE)
            elif after is not None and (last & ~faded):
                dS = load_state(after, None, (n * HV + hv) * WIDTH, v, copies, sbar, WIDTH, V_FIRST, WIDTH // 64, WIDE)
            if work.tape is not None and not last:
                lost = take_over(flag_of(work, work.program - 1, g), work)
                left_at = (work.program - 1) * WIDTH
                dS = load_state(descs.handed, None, left_at, v, copies, sbar, WIDTH, True, WIDTH // 64, WIDE) + lost
            if GRADIENTS and start_desc is not None and ((chunks == 0) & (number == 0)):
                store_state(start_desc, dS, None, (n * HV + hv) * WIDTH, v, copies, WIDTH, V_FIRST, WIDTH // 64)
            for t in range(earlier, earlier + chunks):
                c = earlier + chunks - 1 - t
                s, ph = t % 2, t & 1
                # 0, but the compiler does not know this. Otherwise it would keep the tiles' addresses in registers over
                # the loop.
                z = t >> (30 if work.length is None else 16)
                sdo, sds, sp, sl = tiles.v.index(z), sds1.index(z + g), tiles.P.index(z), tiles.L.index(z)
                if GRADIENTS:
                    ss, su, sdv = tiles.S.index(z), tiles.U.index(z), tiles.dV.index(z + g)
                mbarrier.wait(kq_full.index(s), (t // 2) & 1)  # signalled by the copy engine: q, k and rates are there
                q, k = tiles.q.index(s), sk.index(s)
                for m in gl.static_range(2 // GROUPS):
                    store_scores(q, k, sp, sl, sr, s, g_done, ph, v // 2 + 32 * m, GRADIENTS, STEPS)
                fence_async_shared()
                mbarrier.arrive(p_ready, count=1)
                if GRADIENTS:
                    mbarrier.wait(mid, ph ^ 1)  # signalled by all: they have read dS, S0 and U of the chunk before
                sds.store(dS.to(ty))
                fence_async_shared()
                barrier()  # all warps of this state group: dS is whole in shared memory
                dU = warpgroup_mma(sds, k.permute([1, 0]), zero, use_acc=False, is_async=True)
                mbarrier.wait(bars.do_full, ph)  # signalled by the copy engine: dO is there
                mbarrier.wait(p_ready, ph)  # signalled by the state groups: P is whole
                dU = warpgroup_mma_wait(0, deps=[dU])
                dU *= rate(sr, s, 6).load(ROWS)
                at = lines
                if GRADIENTS and GATE:
                    at = lines + (((run.chunk + c) * HV + hv).to(gl.int64) * LINES + FIXED + GROUP * g) * C
                    mbarrier.wait(bars.u_full, ph)  # signalled by the copy engine: U is there
                    writes = dU * su.slice(v, 64, 1).permute([1, 0]).load(ROWS).to(gl.float32)
                    store_by_warp(at + WRITES * C, writes)
                dU = warpgroup_mma(sdo.slice(v, 64, 1).permute([1, 0]), sp, dU, is_async=True)
                dU = warpgroup_mma_wait(0, deps=[dU])
                if not GRADIENTS:
                    mbarrier.arrive(g_done, count=1)
                mbarrier.wait(bars.a_full, ph)  # signalled by the copy engine: A is there
                dV = times_inverse_back(halves(dU.to(ty)), tiles_in(sa, z, FINE), is_fine(sr, s, FINE))
                mbarrier.arrive(bars.a_free, count=1)
                dV *= rate(sr, s, 3).load(ROWS)
                erased = (dV * rate(sr, s, 4).load(ROWS)).to(ty)
                if GRADIENTS:
                    tma.store_wait(0)  # the copy engine has read dV of the chunk before
                    barrier()  # all warps of this state group: none writes earlier
                    sdv.permute([1, 0]).store(dV.to(ty))
                    fence_async_shared()
                    barrier()  # all warps of this state group: dV is whole
                    mbarrier.arrive(bars.dv_ready, count=1)
                    box, place_in = reinterpret(sdv, ty, [1, 1, C, 64], BOX), RAGGED - size + run.token + c * C
                    tma_store(dv_desc, (RAGGED, row, place_in, hv * WIDTH + v), box)
                    if GATE:
                        mbarrier.wait(bars.s_full, ph)  # signalled by the copy engine: S0 is there
                        i = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW_ROWS))
                        gl.store(at + THROUGH * C + i, through_state(dS, ss, v, WIDTH))
                    mbarrier.arrive(mid, count=1)
                dS *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE)
                dS = warpgroup_mma(gl.convert_layout(erased, wide_operand), k, dS, is_async=True)
                dS = warpgroup_mma_wait(0, deps=[dS])
                reads = sdo.slice(v, 64, 1).permute([1, 0]).load(ROWS).to(gl.float32) * rate(sr, s, 5).load(ROWS)
                mbarrier.arrive(bars.do_free, count=1)
                dS = warpgroup_mma(gl.convert_layout(reads.to(ty), wide_operand), q, dS, is_async=True)
                dS = warpgroup_mma_wait(0, deps=[dS])
                mbarrier.arrive(bars.kq_free.index(s), count=1)
                # This is inside the loop because of Triton 3.9. After the loop, ptxas would serialise all products.
                if work.tape is not None and ((c == 0) & (number > 0)):
                    mbarrier.wait(mid, ph)  # signalled by all: they have read the last dS
                    store_state(descs.handed, dS, None, work.program * WIDTH, v, copies, WIDTH, True, WIDTH // 64)
                    hand_over(flag_of(work, work.program, g))
                if GRADIENTS and start_desc is not None and ((c == 0) & (number == 0)):
                    mbarrier.wait(mid, ph)  # signalled by all: they have read the last dS
                    store_state(start_desc, dS, None, (n * HV + hv) * WIDTH, v, copies, WIDTH, V_FIRST, WIDTH // 64)
            if not GRADIENTS and needed:
                store_state(start_desc, dS, None, (slot * HV + hv) * WIDTH, v, copies, WIDTH, True, WIDTH // 64)
            tma.store_wait(0)
        earlier += chunks


@gluon.jit
def store_by_warp(at, x):
    """Stores four lines: for every warp the sums over its 16 rows of x [64, 64]."""
    sums = gl.sum(x.reshape([4, 16, C]), 1)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, sums.type.layout))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, sums.type.layout))[None, :]
    gl.store(at + w * C + j, sums)
