"""Gradients from the pairs of tokens of a chunk, for all chunks at once: of scores, of strengths and of values.

    dP = tril(dO U^T)        dL = -tril(dV U^T, -1)        dV = b . dU~
    db = <dU~, R - L U>      dv = dV
    pairs_t = sum over j < t <= i of (dP . P + dL . L)_ij         its part of dg

L U is not computed: <dU~_i, (L U)_i> is row i of L . (dU~ U^T), and dL needs the same product. If the erase reads the
undecayed state (Comba), row i of L contains only the gates before its own, and counts for i > t. With a decay per
channel (CHANNEL) L is read, and the results do not contain the decay, which `channel_gradients` applies. For that
kernel (STATES) the products with states are also computed here, since their other factors are already loaded:

    dq = scale dO S0^T      dk = b . dU~ S0^T (the sign of dp turned)      written = U dS1^T      through = S0 . dS1

With a strength per channel (STRENGTH) there is no b, and R contains w . v. So dv = w . dU~ and dw = v . dU~.

Writes the factors that `gradients` multiplies with keys, ``[slots, HV, C, C]`` in the dtype of k: ``dPD``, the gradient
of the products q_i . k_j, and ``taken``, that of p_i . k_j with opposite sign. They include the norms' r_q r_k,
r_p r_k, so that `gradients` can use q, k and p as given. pairs_t is row 0 of ``parts [slots, HV, 4, C]``. Grid
(slots, HV).
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_backward, strength_of
from flash_delta.kernels.device.chunk import (
    count_slots,
    enter_chunk,
    load_block,
    load_tile,
    pitch,
    rows_of,
    sees,
    store_row,
    store_tile,
    whole_rows,
)
from flash_delta.kernels.runtime.arguments import block, launch_rule, state_unit, strides
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Channels, HeadGradients, Residual, Scores, Solved, StateGradients
from flash_delta.kernels.triton.forward.factor import decay, load_gate
from flash_delta.kernels.triton.tiles import tile
from flash_delta.problem import Inputs


@triton.jit
def times_ones(x, ones, PARTS: tl.constexpr):
    """The float32 product of x and a bfloat16 matrix of zeros and ones. x is split into PARTS of 8 bits, whose products
    are exact. 3 of them are all of x.

    Products of the smaller parts, with their sign turned, are subtracted. If one product continued the accumulator of
    another, the compiler would give both warp groups the same rows.
    """
    part = x.to(tl.bfloat16)
    out = tl.dot(part, ones)
    rest = part - x
    for _ in tl.static_range(PARTS - 1):
        part = rest.to(tl.bfloat16)
        out -= tl.dot(part, ones)
        rest -= part
    return out


@triton.jit
def store_product(out, x, factor, column, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    i, c = tl.arange(0, C)[:, None], column + tl.arange(0, BK)[None, :]
    tl.store(out + i * K + c, (x * factor[:, None]).to(out.dtype.element_ty), mask=(i >= 0) & (c < K))


@triton.jit
def state_products(
    dO, do_strides, U, dU, state, dstate, reads, erases, writes, unit, token, stop, dq, dk, written, through,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The tokens' gradients from the state before the chunk and from the gradient of the state after it, BK channels at
    a time."""
    c = tl.arange(0, BK)
    KP: tl.constexpr = pitch(K)
    VP: tl.constexpr = pitch(V)
    for column in range(0, K, BK):
        zero, product = tl.zeros([C, BK], tl.float32), tl.zeros([BK], tl.float32)
        x, y = zero, zero
        for w in range(0, V, BV):
            s = load_block(state, w, column, V, KP, BV, BK)
            x = tl.dot(load_tile(dO, do_strides, token, stop, w, V, C, BV), s, x)
            y = tl.dot(load_block(dU, 0, w, C, VP, C, BV), s, y)
        store_product(dq, x, reads, column, K, BK, C)
        store_product(dk, y, erases, column, K, BK, C)
        x = zero
        for w in range(0, V, BV):
            s, d = load_block(state, w, column, V, KP, BV, BK), load_block(dstate, w, column, V, KP, BV, BK)
            x = tl.dot(load_block(U, 0, w, C, VP, C, BV), d, x)
            product += tl.sum(s.to(tl.float32) * d.to(tl.float32), 0)
        store_product(written, x, writes * unit, column, K, BK, C)
        tl.store(through + column + c, product * unit, mask=column + c < K)


@triton.jit
def store_values(
    dv, dw, lam, v, w, dv_strides, v_strides, w_strides, token, stop, column, V: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Stores dv and dw of BV columns."""
    values = load_tile(v, v_strides, token, stop, column, V, C, BV).to(tl.float32)
    gates = strength_of(load_tile(w, w_strides, token, stop, column, V, C, BV), 1.0, RAW)
    store_tile(dv, dv_strides, (lam * gates).to(dv.dtype.element_ty), token, stop, column, V, C, BV)
    d = strength_backward(lam * values, gates, 1.0, RAW)
    store_tile(dw, dv_strides, d.to(dw.dtype.element_ty), token, stop, column, V, C, BV)


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def pairs(
    q, k, p, do, R, U, dU, L, states, dstates, vectors, norms, cu_seqlens, v, w_gate, dw, dv, dbeta, dPD, taken, parts,
    dq, dk,
    written, through, N, T, scale, unit, beta_top, q_strides, k_strides, p_strides, do_strides, of_v, of_w, H, HV,
    GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, GATE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    UNDECAYED: tl.constexpr, ERASE: tl.constexpr, OWN_P: tl.constexpr, CHANNEL: tl.constexpr, STATES: tl.constexpr,
    STRENGTH: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, hv, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    h = hv // GROUP
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    PARTS: tl.constexpr = 3 if ty == tl.float32 else 2
    VP: tl.constexpr = pitch(V)
    v_strides, b_strides = (T.to(tl.int64) * HV * V, HV * V, V, 1), (T.to(tl.int64) * HV, HV, 1)
    dv_rows = rows_of(dv, v_strides, row, hv)
    if HAS_BETA:
        dbeta_rows = rows_of(dbeta, b_strides, row, hv)
    if STRENGTH:
        dw_rows = rows_of(dw, v_strides, row, hv)
    if empty:
        for w in range(0, V, BV):
            store_tile(dv_rows, v_strides, tl.zeros([C, BV], ty), token, stop, w, V, C, BV)
            if STRENGTH:
                store_tile(dw_rows, v_strides, tl.zeros([C, BV], dw.dtype.element_ty), token, stop, w, V, C, BV)
        if HAS_BETA:
            store_row(dbeta_rows, b_strides, tl.zeros([C], tl.float32), token, stop, C)
        return
    head = slot.to(tl.int64) * HV + hv
    first = vectors + head * 4 * C
    b = tl.load(first + 2 * C + i)
    qk, pk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if (GATE or HAS_BETA) and not CHANNEL:
        q_rows, k_rows = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
        p_rows = rows_of(p, p_strides, row, h)
        for w in range(0, K, BK):
            kk = load_tile(k_rows, k_strides, token, stop, w, K, C, BK)  # [C, BK]
            if GATE:
                qq = load_tile(q_rows, q_strides, token, stop, w, K, C, BK, False, STEPS)
                qk = tl.dot(qq, tl.trans(kk), qk, input_precision=PRECISION)
            if ERASE:
                pp = kk
                if OWN_P:
                    pp = load_tile(p_rows, p_strides, token, stop, w, K, C, BK)
                pk = tl.dot(pp, tl.trans(kk), pk, input_precision=PRECISION)
    do_rows = rows_of(do, do_strides, row, hv)
    dP, M, db = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    for w in range(0, V, BV):
        dO = load_tile(do_rows, do_strides, token, stop, w, V, C, BV, False, STEPS)  # [C, BV]
        u = load_block(U + head * C * VP, 0, w, C, VP, C, BV)
        lam = load_block(dU + head * C * VP, 0, w, C, VP, C, BV)
        dP = tl.dot(dO, tl.trans(u), dP, input_precision=PRECISION)
        if ERASE:
            M = tl.dot(lam, tl.trans(u), M, input_precision=PRECISION)  # dU~ U^T
        if HAS_BETA:
            z = load_block(R + head * C * VP, 0, w, C, VP, C, BV)
            db += tl.sum(lam.to(tl.float32) * z.to(tl.float32), 1)
        if STRENGTH:
            store_values(
                dv_rows, dw_rows, lam.to(tl.float32), rows_of(v, of_v, row, hv), rows_of(w_gate, of_w, row, hv),
                v_strides, of_v, of_w, token, stop, w, V, C, BV, RAW_BETA,
            )  # fmt: skip
        else:
            store_tile(dv_rows, v_strides, (lam * b[:, None]).to(ty), token, stop, w, V, C, BV)
    lower, strict = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    seen = lower if STEPS == 1 else sees(i, i, STEPS)
    rq, rk, rp = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * 3 * C + i
        rq, rk, rp = tl.load(norm), tl.load(norm + C), tl.load(norm + 2 * C)
    if GATE:
        high, low, high_p, low_p, _, _ = load_gate(first, i, C, UNDECAYED)
        dP *= decay(high, low, high, low)
    dP = tl.where(seen, dP * (rq * scale)[:, None] * rk[None, :], 0.0)
    at = head * C * C + i[:, None] * C + i[None, :]
    tl.store(dPD + at, dP.to(ty))
    if ERASE:
        if GATE:
            M *= decay(high_p, low_p, high, low)
        if CHANNEL:  # L already contains the norms
            db -= tl.sum(M * tl.load(L + at, mask=strict, other=0.0).to(tl.float32), 1)
        M = tl.where(strict, M * rp[:, None] * rk[None, :], 0.0)
        tl.store(taken + at, (M * b[:, None]).to(ty))
        if not CHANNEL:
            M *= pk  # L . (dU~ U^T)
            db -= tl.sum(M, 1)
            M *= b[:, None]  # -dL . L
    if HAS_BETA:
        db = strength_backward(db, b, beta_top, RAW_BETA)
        store_row(dbeta_rows, b_strides, db, token, stop, C)
    if GATE:
        dP *= qk  # dP . P
        before = (i[:, None] < i[None, :]).to(tl.bfloat16)  # [j, t]
        if ERASE and not UNDECAYED:
            dP -= M
        carried = tl.where(lower, times_ones(dP, before, PARTS), 0.0)  # [i, t]
        if UNDECAYED:
            carried -= tl.where(strict, times_ones(M, before, PARTS), 0.0)
        tl.store(parts + head * 4 * C + i, tl.sum(carried, 0))
    if STATES:
        values, keys, state = head * C * VP, head * C * K, head * whole_rows(V) * pitch(K)
        state_products(
            do_rows, do_strides, U + values, dU + values, states + state, dstates + state, rq * scale, rp * b, rk, unit,
            token, stop, dq + keys, dk + keys, written + keys, through + head * K, K, BK, V, BV, C,
        )  # fmt: skip


def run_pairs(
    c: Draft, ch: Channels, s: Solved, r: Residual, chain: StateGradients, do: Layout, d: Inputs, scores: Scores,
    heads: HeadGradients, t: Tile | None = None,
) -> None:  # fmt: skip
    p, x = c.p, c.x
    with_states = heads.written is not None
    chosen = t or tile("channel_pairs" if with_states else "pairs", p, c.chip)
    # Steps of loops over K. For states at least 64, since narrower wgmma read wrong addresses (Triton 3.6; docs/notes).
    BK = min(chosen.BV, max(64, block(p.K)) if with_states else block(p.K))
    read = (
        x.q, x.k, c.keys, do, r.R, r.U, chain.dU, ch.L, r.states, chain.dstates, s.vectors, s.norms, x.cu_seqlens,
        *((x.v, x.w, d.w) if p.channel_strength else (None,) * 3),
    )  # fmt: skip
    gates = (strides(x.v), strides(x.w)) if p.channel_strength else (None, None)
    rows = *map(strides, (x.q, x.k, c.keys, do)), *gates
    scalars = p.N, p.T, p.scale, state_unit(p), p.beta_range, *rows
    pointers, grid = (*read, d.v, d.beta, *scores, *heads[:4]), (count_slots(p), p.HV, 1)
    launch_rule(c, pairs, pointers, grid, chosen, *scalars, BK=BK, STATES=with_states, follows=True)
