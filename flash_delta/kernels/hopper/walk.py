"""A walk in segments, side by side, from the states that `compose` has written (maps.py), with A at hand (factor.py).

    load     q, k, rates, A and v of a chunk into a ring of NS slots: one warp
    score    P into a ring of two slots
    state    R = v - e^G . (k S0)     U = A R     S1 = gamma S0 + (e^{G_C - G} . k)^T U
             O = scale (e^G . (q S0) + P U)

Grid (slots, HV): two warp groups with 64 columns of the transposed state each, as in `loop`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_delta.kernels.hopper.factor import load_rates
from flash_delta.kernels.hopper.layouts import BOX, LINES, RAGGED, ROWS, TILE, WIDE_ROWS, WIDTH, C
from flash_delta.kernels.hopper.loop import barriers, load_box, rate
from flash_delta.kernels.hopper.names import barrier, reinterpret, tma_load, tma_store
from flash_delta.kernels.hopper.segments import find_chunks
from flash_delta.kernels.hopper.states import load_state, store_state

SCORES = gl.constexpr(2)  # slots of the ring of P


@gluon.jit
def load_role(
    descs, tiles, bars, cu_seqlens, length, N, T, q_batch, k_batch, v_batch, heads, group, HV,
    NS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, r_desc, a_desc = descs
    sq, sk, sv, sv2, sr, sa = tiles
    full, done = bars
    _, row, start, size, token, chunks, slot, _, _ = find_chunks(length, cu_seqlens, N, T, PACKED)
    hv = gl.program_id(1)
    h = hv // group
    for c in range(chunks):
        s = c % NS
        bar, at = full.index(s), token + c * C
        mbarrier.wait(done.index(s), ((c // NS) & 1) ^ 1)
        mbarrier.expect(bar, 3 * C * WIDTH * 2 + 8 * C * 4 + C * C * 2)
        load_box(k_desc, row * k_batch + start, size, at, h * heads[1], bar, sk.index(s), WIDTH)
        load_box(q_desc, row * q_batch + start, size, at, h * heads[0], bar, sq.index(s), WIDTH)
        load_box(v_desc, row * v_batch + start, size, at, hv * heads[2], bar, sv.index(s), 64)
        load_box(v_desc, row * v_batch + start, size, at, hv * heads[2] + 64, bar, sv2.index(s), 64)
        if c == 0:
            gdc_wait()  # the kernels before have ended: what they wrote is there
        index = (slot + c) * HV + hv
        load_rates(r_desc, index, bar, sr, s)
        tma_load(a_desc, [index * C, 0], bar, sa.index(s))


@gluon.jit
def score_role(tiles, bars, cu_seqlens, length, N, T, NS: gl.constexpr, PACKED: gl.constexpr):
    sq, sk, sr, sp = tiles
    full, pfull, done = bars
    i = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, ROWS))[None, :]
    zero = gl.zeros([C, C], gl.float32, ROWS)
    _, _, _, _, _, chunks, _, _, _ = find_chunks(length, cu_seqlens, N, T, PACKED)
    for t in range(chunks):
        s, x = t % NS, t % SCORES
        mbarrier.wait(full.index(s), (t // NS) & 1)
        P = warpgroup_mma(sq.index(s), sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))
        P = warpgroup_mma_wait(0, deps=[P])
        P = gl.where(i >= j, P * decay, 0.0).to(sk.dtype)
        before = t + (NS - SCORES)  # the phase of `done` that says that the chunk before in this slot is done
        mbarrier.wait(done.index(before % NS), ((before // NS) & 1) ^ 1)
        sp.index(x).store(P)
        fence_async_shared()
        mbarrier.arrive(pfull.index(x), count=1)


@gluon.jit
def state_role(
    o_desc, tiles, so, sbar, bars, starts, final, cu_seqlens, length, N, T, v, HV,
    NS: gl.constexpr, V_FIRST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    sq, sk, sv, sr, sa, sp = tiles
    full, pfull, done = bars
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([64, C], gl.float32, ROWS)
    slot, hv = gl.program_id(0), gl.program_id(1)
    n, row, start, size, token, chunks, _, _, last = find_chunks(length, cu_seqlens, N, T, PACKED)
    row = row * T + start + size
    gdc_wait()
    if (chunks > 0) | last:
        S = load_state(starts, (slot * HV + hv) * WIDTH, v, so, sbar, True, 1)
        for t in range(chunks):
            s, x = t % NS, t % SCORES
            sb = gl.convert_layout(S.to(ty), operand)
            mbarrier.wait(full.index(s), (t // NS) & 1)
            E = warpgroup_mma(sb, sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            O = warpgroup_mma(sb, sq.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            E, O = warpgroup_mma_wait(0, deps=[E, O])
            R = sv.index(s).permute([1, 0]).load(ROWS).to(gl.float32)
            R = (R + E * rate(sr, s, 4).load(ROWS)).to(ty)
            U = warpgroup_mma(
                gl.convert_layout(R, operand), sa.index(s).permute([1, 0]), zero, use_acc=False, is_async=True
            )
            O *= rate(sr, s, 5).load(ROWS)
            S *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE_ROWS)
            U = warpgroup_mma_wait(0, deps=[U])
            written = (U * rate(sr, s, 6).load(ROWS)).to(ty)
            read = U.to(ty)
            S = warpgroup_mma(gl.convert_layout(written, wide_operand), sk.index(s), S, is_async=True)
            mbarrier.wait(pfull.index(x), (t // SCORES) & 1)
            O = warpgroup_mma(gl.convert_layout(read, operand), sp.index(x).permute([1, 0]), O, is_async=True)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            mbarrier.arrive(done.index(s), count=1)
            tma.store_wait(0)
            barrier()
            out = so.index(0)
            out.permute([1, 0]).store(O.to(ty))
            fence_async_shared()
            barrier()
            box = reinterpret(out, ty, [1, 1, C, 64], BOX)
            tma_store(o_desc, [RAGGED, row, RAGGED - size + token + t * C, hv * WIDTH + v], box)
        if last:
            store_state(final, S, (n * HV + hv) * WIDTH, v, so, V_FIRST, 1)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "N", "T", "q_batch", "k_batch", "v_batch", "group", "HV"])
def walk(
    q_desc, k_desc, v_desc, r_desc, a_desc, o_desc, starts, final, cu_seqlens, length, N, T, q_batch, k_batch,
    v_batch, heads, group, HV, V_FIRST: gl.constexpr, PACKED: gl.constexpr, NS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    ty: gl.constexpr = k_desc.dtype
    sq = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sk = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sv = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sv2 = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [2 * NS, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sp = gl.allocate_shared_memory(ty, [SCORES, C, C], TILE)
    so = gl.allocate_shared_memory(ty, [1, C, C], TILE)
    so2 = gl.allocate_shared_memory(ty, [1, C, C], TILE)
    sbar, sbar2 = barriers(1, 1), barriers(1, 1)
    full, pfull, done = barriers(NS, 1), barriers(SCORES, 1), barriers(NS, 2)
    fence_async_shared()
    barrier()
    first = gl.program_id(0) * 0  # a number, not a constant: both groups are compiled as one function
    left, right = (sq, sk, sv, sr, sa, sp), (sq, sk, sv2, sr, sa, sp)
    bars = (full, pfull, done)
    gl.warp_specialize([
        (score_role, ((sq, sk, sr, sp), bars, cu_seqlens, length, N, T, NS, PACKED)),
        (state_role, (o_desc, left, so, sbar, bars, starts, final, cu_seqlens, length, N, T, first, HV, NS, V_FIRST,
                      PACKED)),
        (state_role, (o_desc, right, so2, sbar2, bars, starts, final, cu_seqlens, length, N, T, first + 64, HV, NS,
                      V_FIRST, PACKED)),
        (load_role, ((q_desc, k_desc, v_desc, r_desc, a_desc), (sq, sk, sv, sv2, sr, sa), (full, done), cu_seqlens,
                     length, N, T, q_batch, k_batch, v_batch, heads, group, HV, NS, PACKED)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
