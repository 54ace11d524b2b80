"""Gradients of queries, keys and gates, for all chunks at once. dq and dk are summed over a key head's value heads.

    dq = scale e^G . (dO S0^T) + dPD k                        dp = -e^H . (dV S0^T) - taken k         dV = b . dU~
    dk = e^{G_C - G} . (U dS1^T) + dPD^T q - taken^T p        (and dp, where p is k)
    dg_t = pairs_t + what reads and erases in rows from t on + what writes in rows before t + gamma <S0, dS1>

`pairs` has written dPD, taken and pairs_t, including norms. So q, k and p are multiplied as they are in memory. With a
norm, y = r x has length 1, the accumulated gradient is z = r dy, and r (dy - y <y, dy>) = z - y <y, z>.

`query_gradients` and `key_gradients`, grid (slots, H), write the terms of dg to ``parts [slots, HV, 4, C]``: pairs_t +
gamma <S0, dS1>, and the terms of reading, erasing and writing. `gates`, grid (slots, HV), sums them only over the rows
that contain gate t, so that nothing cancels (docs/mathematics.md section 4). It also runs the backward pass of the raw
gate. The caller sums dA_log and ddt_bias ``[slots, HV]`` over slots. `gates` is a separate kernel because on AMD a
barrier does not make one thread's stores visible to other threads.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import (
    count_slots,
    enter_chunk,
    find_chunk,
    follow,
    load_block,
    load_row,
    load_tile,
    pitch,
    rows_of,
    store_row,
    store_tile,
    whole_rows,
)
from flash_delta.kernels.device.gates import head_gate_backward
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, strides, tokens
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Factors, Residual, Scores, Solved, StateGradients
from flash_delta.kernels.triton.tiles import WARP, tile
from flash_delta.problem import Inputs


@triton.jit
def norm_backward(z, x, r):
    """z - y <y, z>, y = r x."""
    y = x * r[:, None]
    return z - y * tl.sum(y * z, 1)[:, None]


@triton.jit
def add(z, t, x, before, GATE: tl.constexpr, OWN_SUMS: tl.constexpr):
    """Adds ``t`` to the accumulator ``z``. With OWN_SUMS t began with 0. Without it t began with z, and is their sum.

    Returns the new accumulator, what t has added to the row sums of x z, and ``before`` for the next call: without
    OWN_SUMS the row sums of x z so far.
    """
    sums = before
    if GATE:
        sums = tl.sum(x * t, 1)
    if OWN_SUMS:
        return z + t, sums, before
    else:
        return t, sums - before, sums


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def query_gradients(
    q, k, do, states, dPD, norms, rates, cu_seqlens, dq, parts, N, T, q_strides, k_strides, do_strides, H, HV,
    GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores dq of one chunk and key head, and the queries' terms of dg in row 1 of ``parts``."""
    slot, h, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    KP: tl.constexpr = pitch(K)
    STATE: tl.constexpr = whole_rows(V) * KP
    out_strides = ((T // STEPS).to(tl.int64) * H * K, H * K, K, 1)
    dq_rows = rows_of(dq, out_strides, row, h)
    if empty:
        store_tile(dq_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK, False, STEPS)
        return
    qq = load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK, False, STEPS)  # [C, BK]
    kk = load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK)
    OWN_SUMS: tl.constexpr = ty == tl.float32  # see key_gradients
    z, before = tl.zeros([C, BK], tl.float32), tl.zeros([C], tl.float32)
    for member in range(GROUP):
        hv = h * GROUP + member
        head = slot.to(tl.int64) * HV + hv
        do_rows = rows_of(do, do_strides, row, hv)
        e_q = tl.load(rates + head * 4 * C + i)  # scale e^G r_q
        t = tl.zeros([C, BK], tl.float32) if OWN_SUMS else z
        for w in range(0, V, BV):
            s0 = load_block(states + head * STATE, w, 0, V, KP, BV, BK)
            dO = load_tile(do_rows, do_strides, token, stop, w, V, C, BV, False, STEPS)
            t = tl.dot((dO * e_q[:, None]).to(ty), s0, t, input_precision=PRECISION)
        z, sums, before = add(z, t, qq, before, GATE, OWN_SUMS)
        if GATE:
            tl.store(parts + head * 4 * C + C + i, sums)
        z = tl.dot(load_block(dPD + head * C * C, 0, 0, C, C, C, C), kk, z, input_precision=PRECISION)
        if GATE and not OWN_SUMS:
            before = tl.sum(qq * z, 1)
    if NORM:
        z = norm_backward(z, qq, tl.load(norms + (slot.to(tl.int64) * H + h) * 3 * C + i))
    store_tile(dq_rows, out_strides, z.to(ty), token, stop, 0, K, C, BK, False, STEPS)


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def key_gradients(
    q, k, p, U, dU, states, dstates, dPD, taken, vectors, norms, rates, cu_seqlens, dk, dp, parts, N, T, q_strides,
    k_strides, p_strides, H, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    ERASE: tl.constexpr, OWN_P: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores dk (and dp) of one chunk and key head, and the terms of dg for erasing and writing in rows 2 and 3 of
    ``parts``."""
    slot, h, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    KP: tl.constexpr = pitch(K)
    VP: tl.constexpr = pitch(V)
    STATE: tl.constexpr = whole_rows(V) * KP
    out_strides = (T.to(tl.int64) * H * K, H * K, K, 1)
    dk_rows = rows_of(dk, out_strides, row, h)
    if OWN_P:
        dp_rows = rows_of(dp, out_strides, row, h)
    if empty:
        store_tile(dk_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
        if OWN_P:
            store_tile(dp_rows, out_strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
        return
    kk = load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK)  # [C, BK]
    qq = load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK, False, STEPS)
    pp = kk
    if OWN_P:
        pp = load_tile(rows_of(p, p_strides, row, h), p_strides, token, stop, 0, K, C, BK)
    rk = tl.full([C], 1.0, tl.float32)
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * 3 * C + i
        rk = tl.load(norm + C)
    # The row sums of a summand are differences of the accumulator's row sums, which costs the last digits in float32.
    # So in float32 every summand has its own accumulator, since float32 spills anyway. In 16 bits this would spill 700
    # bytes (sm_90a, K = V = 128).
    OWN_SUMS: tl.constexpr = ty == tl.float32
    d = tl.arange(0, BV)
    z, zp = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    before, before_p = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for member in range(GROUP):
        head = slot.to(tl.int64) * HV + h * GROUP + member
        rate, e_k, through = rates + head * 4 * C, rk, 0.0
        if GATE:
            part, first = parts + head * 4 * C, vectors + head * 4 * C
            high, low = tl.load(first + C - 1) - tl.load(first + i), tl.load(first + 2 * C - 1) - tl.load(first + C + i)
            e_k = rk * tl.exp(high + low)
        e_p = tl.load(rate + C + i) * tl.load(vectors + head * 4 * C + 2 * C + i)  # b e^H r_p
        erased = zp if OWN_P else z
        t = tl.zeros([C, BK], tl.float32) if OWN_SUMS else erased
        for w in range(0, V, BV):
            s0 = load_block(states + head * STATE, w, 0, V, KP, BV, BK)
            if ERASE:
                lam = load_block(dU + head * C * VP, 0, w, C, VP, C, BV)
                t = tl.dot((lam * -e_p[:, None]).to(ty), s0, t, input_precision=PRECISION)
            if GATE:
                ds1 = load_block(dstates + head * STATE, w, 0, V, KP, BV, BK)
                # <S0, dS1> is the trace of a product, so neither factor has to go through registers
                rows = tl.dot(s0, tl.trans(ds1), input_precision=PRECISION)
                through += tl.sum(tl.where(d[:, None] == d[None, :], rows, 0.0))
        if GATE:
            tl.store(part + i, tl.load(part + i) + tl.load(rate + 3 * C) * through)
        if ERASE:
            if OWN_P:
                zp, sums, before_p = add(zp, t, pp, before_p, GATE, OWN_SUMS)
            else:
                z, sums, before = add(z, t, kk, before, GATE, OWN_SUMS)
            if GATE:
                tl.store(part + 2 * C + i, sums)
        t = tl.zeros([C, BK], tl.float32) if OWN_SUMS else z
        for w in range(0, V, BV):
            u = load_block(U + head * C * VP, 0, w, C, VP, C, BV)
            ds1 = load_block(dstates + head * STATE, w, 0, V, KP, BV, BK)
            t = tl.dot((u * e_k[:, None]).to(ty), ds1, t, input_precision=PRECISION)
        z, sums, before = add(z, t, kk, before, GATE, OWN_SUMS)
        if GATE:
            tl.store(part + 3 * C + i, sums)
        pairs_qk = load_block(dPD + head * C * C, 0, 0, C, C, C, C)
        z = tl.dot(tl.trans(pairs_qk), qq, z, input_precision=PRECISION)
        if ERASE:
            pairs_pk = load_block(taken + head * C * C, 0, 0, C, C, C, C)
            z -= tl.dot(tl.trans(pairs_pk), pp, input_precision=PRECISION)
            if OWN_P:
                zp -= tl.dot(pairs_pk, kk, input_precision=PRECISION)
            else:
                z -= tl.dot(pairs_pk, kk, input_precision=PRECISION)
        if GATE and not OWN_SUMS:
            before = tl.sum(kk * z, 1)
            if OWN_P:
                before_p = tl.sum(pp * zp, 1)
    if NORM:
        z = norm_backward(z, kk, rk)
    store_tile(dk_rows, out_strides, z.to(ty), token, stop, 0, K, C, BK)
    if OWN_P:
        if NORM:
            zp = norm_backward(zp, pp, tl.load(norm + 2 * C))
        store_tile(dp_rows, out_strides, zp.to(ty), token, stop, 0, K, C, BK)


@triton.jit
def store_gate(
    sums, given, row, hv, head, token, stop, T, all_strides, HV, C: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Stores dg of one chunk and value head from the gradients ``sums`` of log decays, and its parts of the gradients
    of the raw gate's parameters. ``decays``: where the log decays of a raw gate are."""
    g, A_log, dt_bias, decays, dg, dA_log, ddt_bias = given
    i = tl.arange(0, C)
    if RAW_GATE:
        live = token + i < stop
        if STEPS > 1:
            live &= i % STEPS == 0
        a = load_row(rows_of(g, all_strides, row, hv), all_strides, token, stop, C, STEPS)
        if HAS_BIAS:
            a += tl.load(dt_bias + hv).to(tl.float32)
        tl.store(dA_log + head, tl.sum(tl.where(live, sums * tl.load(decays + i), 0.0)))
        sums = head_gate_backward(sums, a, -tl.exp(tl.load(A_log + hv).to(tl.float32)))
        if HAS_BIAS:
            tl.store(ddt_bias + head, tl.sum(tl.where(live, sums, 0.0)))
    strides = ((T // STEPS).to(tl.int64) * HV, HV, 1)
    store_row(rows_of(dg, strides, row, hv), strides, sums, token, stop, C, STEPS)


@triton.jit(do_not_specialize=["N", "T", "g_batch", "HV"], do_not_specialize_on_alignment=PER_TOKEN)
def gates(
    g, A_log, dt_bias, vectors, parts, cu_seqlens, dg, dA_log, ddt_bias, N, T, g_batch, g_token, g_head,
    HV, C: tl.constexpr, PACKED: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    UNDECAYED: tl.constexpr, ERASE: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Stores dg of one chunk and value head, from its ``parts``. Also runs the backward pass of a raw gate. Grid
    (slots, HV)."""
    follow(OVERLAP)
    slot, hv = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    i = tl.arange(0, C)
    head = slot.to(tl.int64) * HV + hv
    dg_strides = ((T // STEPS).to(tl.int64) * HV, HV, 1)
    dg_rows = rows_of(dg, dg_strides, row, hv)
    if PACKED and ((token >= stop) | (n >= N)):  # as in `enter_chunk`
        store_row(dg_rows, dg_strides, tl.zeros([C], tl.float32), token, stop, C, STEPS)
        if RAW_GATE:
            tl.store(dA_log + head, 0.0)
        if HAS_BIAS:
            tl.store(ddt_bias + head, 0.0)
        return
    parts = parts + head * 4 * C + i
    reads, writes = tl.load(parts + C), tl.load(parts + 3 * C)
    carrying = i[:, None] <= i[None, :]  # [t, i]: the reading row i contains gate t, and the writing row i does not
    sums = tl.load(parts) + tl.sum(tl.where(carrying, reads[None, :], writes[None, :]), 1)
    if ERASE:
        if UNDECAYED:  # row i erases with only the gates before its own
            carrying = i[:, None] < i[None, :]
        sums += tl.sum(tl.where(carrying, tl.load(parts + 2 * C)[None, :], 0.0), 1)
    given = (g, A_log, dt_bias, vectors + head * 4 * C + 3 * C, dg, dA_log, ddt_bias)
    strides = (g_batch, g_token, g_head)
    store_gate(sums, given, row, hv, head, token, stop, T, strides, HV, C, RAW_GATE, HAS_BIAS, STEPS)


def run_query_gradients(
    c: Draft, s: Solved, f: Factors, r: Residual, do: Layout, dq: Layout, scores: Scores, t: Tile | None = None
) -> None:
    p, x = c.p, c.x
    pointers = (x.q, x.k, do, r.states, scores.queries, s.norms, f.rates, x.cu_seqlens, dq, scores.parts)
    scalars = p.N, p.T, strides(x.q), strides(x.k), strides(do)
    chosen = t or tile("query_gradients", p, c.chip)
    launch_rule(c, query_gradients, pointers, (count_slots(p), p.H, 1), chosen, *scalars, follows=True)


def run_key_gradients(
    c: Draft, s: Solved, f: Factors, r: Residual, chain: StateGradients, d: Inputs, scores: Scores,
    t: Tile | None = None,
) -> None:  # fmt: skip
    p, x = c.p, c.x
    pointers = (
        x.q, x.k, c.keys, r.U, chain.dU, r.states, chain.dstates, scores.queries, scores.keys, s.vectors, s.norms,
        f.rates, x.cu_seqlens, d.k, d.p, scores.parts,
    )  # fmt: skip
    scalars = p.N, p.T, strides(x.q), strides(x.k), strides(c.keys)
    chosen = t or tile("key_gradients", p, c.chip)
    launch_rule(c, key_gradients, pointers, (count_slots(p), p.H, 1), chosen, *scalars, follows=True)


def run_gates(c: Draft, s: Solved, scores: Scores, dg: Layout, dA_log: Layout | None, ddt_bias: Layout | None) -> None:
    """Computes dg, and the gradients of A_log and dt_bias of every chunk, ``[slots, HV]``, which the caller sums."""
    p, x = c.p, c.x
    pointers = (x.g, x.A_log, x.dt_bias, s.vectors, scores.parts, x.cu_seqlens, dg, dA_log, ddt_bias)
    scalars = p.N, p.T, batch(x.g), *tokens(x.g)
    launch_rule(c, gates, pointers, (count_slots(p), p.HV, 1), WARP, *scalars, follows=True)
