"""What queries, keys and gates get, all chunks at once; dq and dk are written once, summed over a key head's heads.

    dq = scale e^G . (dO S0^T) + dPD k                        dp = -e^H . (dV S0^T) + dpk k           dV = b . dU~
    dk = e^{G_C - G} . (U dS1^T) + dPD^T q + dpk^T p          (and dp, where p is k)
    dg_t = pairs_t + what reads and erases in rows from t on + what writes in rows before t + gamma <S0, dS1>

Columns are tokens here: a product has at least 64 rows for every four warps, or warps repeat each other's, and keys are
128 where a chunk is 64.

`pairs` has written dPD, dpk and pairs_t, with the norms in them: q, k and p are multiplied as they lie in memory. With
a norm, y = r x has length 1, what is accumulated is z = r dy, and r (dy - y <y, dy>) = z - y <y, z>.

`query_gradients` and `key_gradients`, grid (slots, H), leave the terms of dg in ``parts [slots, HV, 4, C]``: pairs_t +
gamma <S0, dS1>, what is read, erased and written. `gates`, grid (slots, HV), sums them over just the rows that carry
gate t, so that nothing cancels (docs/mathematics.md section 4), and undoes the raw gate; dA_log and ddt_bias ``[slots,
HV]`` are left to be summed over slots. A kernel of its own, because a barrier does not make one thread's stores
visible to another on AMD.
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.chunk import (
    find_chunk,
    follow,
    lead,
    load_row,
    load_tile,
    rows_of,
    store_row,
    store_tile,
)
from flash_delta.kernels.triton.pairs import load_block


@triton.jit
def norm_backward(z, x, r):
    """z - y <y, z>, y = r x; columns are tokens."""
    y = x * r[None, :]
    return z - y * tl.sum(y * z, 0)[None, :]


@triton.jit(do_not_specialize=["N", "T"])
def query_gradients(
    q, k, do, states, dPD, norms, rates, cu_seqlens, dq, parts, N, T,
    q_strides, k_strides, do_strides, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the queries of one chunk and key head, and what they read, row 1 of ``parts``."""
    lead(OVERLAP)
    follow(OVERLAP)
    slot, h = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    GROUP: tl.constexpr = HV // H
    out_strides = (T.to(tl.int64) * H * K, H * K, K, 1)
    dq_rows = rows_of(dq, out_strides, row, h)
    if PACKED:  # noqa: SIM102 (a constant, then a number)
        if (token >= stop) | (n >= N):  # behind the last sequence; without a chunk, no row is stored
            store_tile(dq_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
            return
    qq = tl.trans(load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK))  # [BK, C]
    kk = tl.trans(load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK))
    z = tl.zeros([BK, C], tl.float32)
    for member in range(GROUP):
        hv = h * GROUP + member
        head = slot.to(tl.int64) * HV + hv
        do_rows = rows_of(do, do_strides, row, hv)
        t = tl.zeros([BK, C], tl.float32)
        for w in range(0, V, BV):
            s0 = load_block(states + head * V * K, w, 0, V, K, BV, BK)
            dO = load_tile(do_rows, do_strides, token, stop, w, V, C, BV)
            t = tl.dot(tl.trans(s0), tl.trans(dO), t, input_precision=PRECISION)
        t *= tl.load(rates + head * 4 * C + i)[None, :]  # scale e^G r_q
        if GATE:
            tl.store(parts + head * 4 * C + C + i, tl.sum(qq * t, 0))
        z += t
        z = tl.dot(kk, tl.trans(load_block(dPD + head * C * C, 0, 0, C, C, C, C)), z, input_precision=PRECISION)
    if NORM:
        z = norm_backward(z, qq, tl.load(norms + (slot.to(tl.int64) * H + h) * 3 * C + i))
    store_tile(dq_rows, out_strides, tl.trans(z.to(ty)), token, stop, 0, K, C, BK)


@triton.jit(do_not_specialize=["N", "T"])
def key_gradients(
    q, k, p, U, dU, states, dstates, dPD, dpk, vectors, norms, rates, cu_seqlens, dk, dp, parts, N, T,
    q_strides, k_strides, p_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    ERASE: tl.constexpr, OWN_P: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (and dp) of one chunk and key head, and what they erase and write, rows 2 and 3 of ``parts``."""
    lead(OVERLAP)
    follow(OVERLAP)
    slot, h = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    GROUP: tl.constexpr = HV // H
    out_strides = (T.to(tl.int64) * H * K, H * K, K, 1)
    dk_rows = rows_of(dk, out_strides, row, h)
    if OWN_P:
        dp_rows = rows_of(dp, out_strides, row, h)
    if PACKED:  # noqa: SIM102 (a constant, then a number)
        if (token >= stop) | (n >= N):
            store_tile(dk_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
            if OWN_P:
                store_tile(dp_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
            return
    kk = tl.trans(load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK))  # [BK, C]
    qq = tl.trans(load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK))
    pp = kk
    if OWN_P:
        pp = tl.trans(load_tile(rows_of(p, p_strides, row, h), p_strides, token, stop, 0, K, C, BK))
    rk = tl.full([C], 1.0, tl.float32)
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * 3 * C + i
        rk = tl.load(norm + C)
    z, zp = tl.zeros([BK, C], tl.float32), tl.zeros([BK, C], tl.float32)
    for member in range(GROUP):
        head = slot.to(tl.int64) * HV + h * GROUP + member
        rate, e_k = rates + head * 4 * C, rk
        if GATE:
            part, first = parts + head * 4 * C + i, vectors + head * 4 * C
            high, low = tl.load(first + C - 1) - tl.load(first + i), tl.load(first + 2 * C - 1) - tl.load(first + C + i)
            e_k *= tl.exp(high + low)
        t, through = tl.zeros([BK, C], tl.float32), 0.0
        for w in range(0, V, BV):
            ds1 = load_block(dstates + head * V * K, w, 0, V, K, BV, BK)
            u = load_block(U + head * C * V, 0, w, C, V, C, BV)
            t = tl.dot(tl.trans(ds1), tl.trans(u), t, input_precision=PRECISION)
            if GATE:
                s0 = load_block(states + head * V * K, w, 0, V, K, BV, BK)
                through += tl.sum(s0.to(tl.float32) * ds1.to(tl.float32))
        t *= e_k[None, :]
        if GATE:
            tl.store(part, tl.load(part) + tl.load(rate + 3 * C) * through)
            tl.store(part + 3 * C, tl.sum(kk * t, 0))
        z += t
        if ERASE:
            t = tl.zeros([BK, C], tl.float32)
            for w in range(0, V, BV):
                s0 = load_block(states + head * V * K, w, 0, V, K, BV, BK)
                lam = load_block(dU + head * C * V, 0, w, C, V, C, BV)
                t = tl.dot(tl.trans(s0), tl.trans(lam), t, input_precision=PRECISION)
            t *= -(tl.load(rate + C + i) * tl.load(rate + 2 * C + i))[None, :]  # -b e^H r_p
            if GATE:
                tl.store(part + 2 * C, tl.sum(pp * t, 0))
            if OWN_P:
                zp += t
            else:
                z += t
        z = tl.dot(qq, load_block(dPD + head * C * C, 0, 0, C, C, C, C), z, input_precision=PRECISION)
        if ERASE:
            scores = load_block(dpk + head * C * C, 0, 0, C, C, C, C)
            if OWN_P:
                z = tl.dot(pp, scores, z, input_precision=PRECISION)
                zp = tl.dot(kk, tl.trans(scores), zp, input_precision=PRECISION)
            else:  # of one triangle each
                z = tl.dot(kk, scores + tl.trans(scores), z, input_precision=PRECISION)
    if NORM:
        z = norm_backward(z, kk, rk)
    store_tile(dk_rows, out_strides, tl.trans(z.to(ty)), token, stop, 0, K, C, BK)
    if OWN_P:
        if NORM:
            zp = norm_backward(zp, pp, tl.load(norm + 2 * C))
        store_tile(dp_rows, out_strides, tl.trans(zp.to(ty)), token, stop, 0, K, C, BK)


@triton.jit(do_not_specialize=["N", "T", "g_batch"])
def gates(
    g, A_log, dt_bias, vectors, parts, cu_seqlens, dg, dA_log, ddt_bias, N, T, g_batch, g_strides,
    HV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    UNDECAYED: tl.constexpr, ERASE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dg of one chunk and value head from its ``parts``, and the raw gate's backward pass. Grid (slots, HV)."""
    follow(OVERLAP)
    slot, hv = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    i = tl.arange(0, C)
    head = slot.to(tl.int64) * HV + hv
    dg_strides = (T.to(tl.int64) * HV, HV, 1)
    dg_rows = rows_of(dg, dg_strides, row, hv)
    if PACKED:  # noqa: SIM102 (a constant, then a number)
        if (token >= stop) | (n >= N):  # behind the last sequence; without a chunk, no row is stored
            store_row(dg_rows, dg_strides, tl.zeros([C], tl.float32), token, stop, C)
            if RAW_GATE:
                tl.store(dA_log + head, 0.0)
            if HAS_BIAS:
                tl.store(ddt_bias + head, 0.0)
            return
    parts = parts + head * 4 * C + i
    reads, writes = tl.load(parts + C), tl.load(parts + 3 * C)
    carrying = i[:, None] <= i[None, :]  # [t, i]: what reads in row i carries gate t, what writes there does not
    sums = tl.load(parts) + tl.sum(tl.where(carrying, reads[None, :], writes[None, :]), 1)
    if ERASE:
        if UNDECAYED:  # row i erases with the gates before its own
            carrying = i[:, None] < i[None, :]
        sums += tl.sum(tl.where(carrying, tl.load(parts + 2 * C)[None, :], 0.0), 1)
    if RAW_GATE:
        live = token + i < stop
        all_strides = (g_batch, g_strides[0], g_strides[1])
        a = load_row(rows_of(g, all_strides, row, hv), all_strides, token, stop, C)
        if HAS_BIAS:
            a += tl.load(dt_bias + hv).to(tl.float32)
        decays = tl.load(vectors + head * 4 * C + 3 * C + i)
        tl.store(dA_log + head, tl.sum(tl.where(live, sums * decays, 0.0)))
        sums *= -tl.exp(tl.load(A_log + hv).to(tl.float32)) / (1.0 + tl.exp(-a))
        if HAS_BIAS:
            tl.store(ddt_bias + head, tl.sum(tl.where(live, sums, 0.0)))
    store_row(dg_rows, dg_strides, sums, token, stop, C)
