"""The role of `scan_gradients` that computes the gradients of queries, keys and gates (see scan.py)."""

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

from flash_delta.kernels.hopper.device.gluon_compat import barrier, tma_store
from flash_delta.kernels.hopper.device.layouts import RAGGED, ROWS, C
from flash_delta.kernels.hopper.device.rings import as_box, place_of, rate, sees
from flash_delta.kernels.hopper.device.state_copies import apart_all
from flash_delta.kernels.hopper.device.work_items import find_pieces, find_run
from flash_delta.kernels.hopper.scalar.backward.memory import ERASED, PAIRS, READS, TAKEN
from flash_delta.kernels.hopper.scalar.backward.state_role import store_by_warp


@gluon.jit
def score_decay(sr, s):
    """The factor of q k^T in P. Above the diagonal it may be infinite."""
    return gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))


@gluon.jit
def row_products(tile, x, WIDTH: gl.constexpr):
    """Row sums of a tile times x, both [64, WIDTH]. It takes 64 columns at a time, which needs fewer registers."""
    parts = apart_all(x, WIDTH // 64)
    sums = gl.sum(tile.slice(0, 64, 1).load(ROWS).to(gl.float32) * gl.convert_layout(parts[0], ROWS), 1)
    for m in gl.static_range(1, WIDTH // 64):
        sums += gl.sum(tile.slice(64 * m, 64, 1).load(ROWS).to(gl.float32) * gl.convert_layout(parts[m], ROWS), 1)
    return sums


@gluon.jit
def gradient_role(
    dq_desc, dk_desc, tiles, bars, so1, lines, work, HV, GATE: gl.constexpr, LINES: gl.constexpr, STEPS: gl.constexpr
):
    """``tiles``: `ChunkTiles`. ``bars``: `BackBarriers`. ``so1``: the ring of dq and dk."""
    sk, sds1, sdv1, sr = tiles.k, tiles.dS, tiles.dV, tiles.rates
    WIDTH: gl.constexpr = sk.shape[2]
    GROUPS: gl.constexpr = WIDTH // 64
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([C, C], gl.float32, ROWS)
    wide = gl.zeros([C, WIDTH], gl.float32, WIDE)
    rows = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    i, j = rows[:, None], gl.arange(0, C, layout=gl.SliceLayout(0, ROWS))[None, :]
    pieces, earlier = find_pieces(work, HV), 0
    for piece in range(pieces.begin, pieces.end, pieces.step):
        hv, _, run = find_run(piece, pieces, work, HV, True)
        size, chunks = run.size, run.chunks
        row = run.row * work.T + run.start + size
        gdc_wait()  # the kernels before this one have ended, so that this one may write
        for t in range(earlier, earlier + chunks):
            c = earlier + chunks - 1 - t
            s, ph = t % 2, t & 1
            z = t >> (30 if work.length is None else 16)  # 0, but the compiler does not know this (state_role.py)
            sdo, ss, su = tiles.v.index(z), tiles.S.index(z), tiles.U.index(z)
            sp, sl, so = tiles.P.index(z), tiles.L.index(z), so1.index(z)
            left = RAGGED - size + run.token + c * C
            line = lines + ((run.chunk + c) * HV + hv).to(gl.int64) * (LINES * C)
            mbarrier.wait(bars.kq_full.index(s), (t // 2) & 1)  # signalled by the copy engine: q, k and rates are there
            q, k = tiles.q.index(s), sk.index(s)
            mbarrier.wait(bars.do_full, ph)  # signalled by the copy engine: dO is there
            mbarrier.wait(bars.s_full, ph)  # signalled by the copy engine: S0 is there
            mbarrier.wait(bars.u_full, ph)  # signalled by the copy engine: U is there
            dP = warpgroup_mma(sdo, su.permute([1, 0]), zero, use_acc=False, is_async=True)
            dq = warpgroup_mma(sdo, ss, wide, use_acc=False, is_async=True)
            mbarrier.wait(bars.p_ready, ph)  # signalled by the state groups: P and L are there
            dP, dq = warpgroup_mma_wait(1, deps=[dP, dq])
            if GATE:
                X = dP * sp.load(ROWS).to(gl.float32)
            dP = gl.where(sees(i, j, STEPS), dP * score_decay(sr, s), 0.0).to(ty)
            dq = warpgroup_mma_wait(0, deps=[dq])
            dq *= rate(sr, s, 5).permute([1, 0]).load(WIDE)
            if GATE:
                reads = row_products(q, dq, WIDTH)
            dq = warpgroup_mma(gl.convert_layout(dP, wide_operand), k, dq, is_async=True)
            mbarrier.wait(bars.dv_ready, ph)  # signalled by the state groups: dV is there, and they have read P
            M = warpgroup_mma(sdv1.index(z), su.slice(0, 64, 1).permute([1, 0]), zero, use_acc=False, is_async=True)
            for g in gl.static_range(1, GROUPS):
                M = warpgroup_mma(sdv1.index(z + g), su.slice(64 * g, 64, 1).permute([1, 0]), M, is_async=True)
            tma.store_wait(0)  # the copy engine has read dk of the chunk before
            dq, M = warpgroup_mma_wait(GROUPS, deps=[dq, M])
            barrier()  # all warps of this role: none writes earlier
            so.store(dq.to(ty))
            sp.store(dP)
            fence_async_shared()
            barrier()  # all warps of this role: dq and dP are whole in shared memory
            of_dq = as_box(so, ty, WIDTH, STEPS)
            tma_store(dq_desc, place_of(row, left, hv * WIDTH, STEPS), of_dq)
            decay = score_decay(sr, s) * rate(sr, s, 2).permute([1, 0]).load(ROWS)
            M = warpgroup_mma_wait(0, deps=[M])
            gl.store(line + ERASED * C + rows, gl.sum(gl.where(i == j, M, 0.0), 1))
            erased = M * sl.load(ROWS).to(gl.float32)
            gl.store(line + TAKEN * C + rows, gl.sum(erased, 1))
            if GATE:
                X -= erased
            barrier()  # all warps of this role: they have read L
            sl.store(gl.where(i > j, -M * decay, 0.0).to(ty))
            if GATE:
                tma.store_wait(0)  # the copy engine has read dq
                barrier()  # all warps of this role: none writes earlier
                so.slice(0, 64, 1).store(gl.where(i < j, zero + 1.0, zero).to(ty))
            fence_async_shared()
            barrier()  # all warps of this role: what they wrote is there for wgmma
            dk = wide
            if GATE:
                high = X.to(ty)
                low = (X - high.to(gl.float32)).to(ty)
                ones = so.slice(0, 64, 1)
                carried = warpgroup_mma(gl.convert_layout(high, operand), ones, zero, use_acc=False, is_async=True)
                carried = warpgroup_mma(gl.convert_layout(low, operand), ones, carried, is_async=True)
            for g in gl.static_range(GROUPS):
                dk = warpgroup_mma(sdv1.index(z + g), ss.slice(64 * g, 64, 0), dk, use_acc=g > 0, is_async=True)
            if GATE:
                carried, dk = warpgroup_mma_wait(GROUPS, deps=[carried, dk])
                store_by_warp(line + PAIRS * C, gl.where(i >= j, carried, 0.0))
            dk = warpgroup_mma_wait(0, deps=[dk])
            dk *= rate(sr, s, 4).permute([1, 0]).load(WIDE)
            if GATE:
                reads += row_products(k, dk, WIDTH)
                gl.store(line + READS * C + rows, reads)
            for g in gl.static_range(GROUPS):
                written = su.slice(64 * g, 64, 1).load(operand).to(gl.float32)
                written = (written * rate(sr, s, 6).permute([1, 0]).load(operand)).to(ty)
                dk = warpgroup_mma(written, sds1.index(z + g), dk, is_async=True)
            dk = warpgroup_mma(sp.permute([1, 0]), q, dk, is_async=True)
            dk = warpgroup_mma(sl.permute([1, 0]), k, dk, is_async=True)
            dk = warpgroup_mma(sl, k, dk, is_async=True)
            dk = warpgroup_mma_wait(3, deps=[dk])
            mbarrier.arrive(bars.mid, count=1)
            dk = warpgroup_mma_wait(0, deps=[dk])
            mbarrier.arrive(bars.g_done, count=1)
            if not GATE:
                tma.store_wait(0)  # the copy engine has read dq
            barrier()  # all warps of this role: none writes earlier, or while others multiply by the ones
            so.store(dk.to(ty))
            fence_async_shared()
            barrier()  # all warps of this role: dk is whole in shared memory
            tma_store(dk_desc, place_of(row, left, hv * WIDTH), as_box(so, ty, WIDTH))
            mbarrier.arrive(bars.kq_free.index(s), count=1)
        earlier += chunks
    tma.store_wait(0)
