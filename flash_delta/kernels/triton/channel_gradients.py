"""What queries, keys and gates get where every key channel has a gate of its own, all chunks at once.

    dq = scale e^G . (dO S0^T) + sum over j <= i of dP_ij e^{G_i - G_j} . k_j
    dp = -e^G . (dV S0^T) + sum over j < i of dL_ij e^{G_i - G_j} . k_j
    dk = e^{G_C - G} . (U dS1^T) + sum over i >= j of e^{G_i - G_j} . (dP_ij q_i + dL_ij k_i)      (and dp, as p is k)
    dg_t = rows of (gamma S0 . dS1) + what tokens from t on do with those before t + what those before t leave behind

`pairs` has written dPD and taken, the gradients of q_i . k_j and of p_i . k_j (sign turned), with the norms in them: q
and k are multiplied as they lie in memory, and with a norm y = r x what is accumulated is z = r dy (see gradients.py).

A tile is [W, 16]: W channels, a row of the accumulators each, of a block of 16 tokens. So decayed copies go into the
next product from registers, and are multiplied with 16 x 16 blocks of dPD and taken. The decay of a pair is split at
the first token of the row's block, ``(q_i e^{G_i - r}) (k_j e^{r - G_j})``: for the columns of earlier blocks both
factors are at most 1. Within the block the second one is as large as a channel falls there; where that is more than
``MILD``, the block is halved again and again, and r is the first token of a later half: no factor is above 1.
Exponents are sums of just the gates that a factor carries, by products with ones, whatever came before.

A gate's gradient is summed over just what carries the gate, so that nothing cancels: what rows add to dq and dp counts
up to their own tokens, what columns add to dk from the token behind them on, and blocks between the two get all of it.
In a block that is not halved it is the difference of two sums that all its pairs are in. What a pair adds to either is
the product of the same three rounded numbers, and cancels up to float32's rounding: good enough for bfloat16.

Grid (slots K / W, HV). `key_head_gradients` sums dq and dk over the value heads of a key head and undoes the norms: a
kernel of its own, because row sums over all channels would have to wait for other programs.
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.channel import store_channels
from flash_delta.kernels.triton.channel_gate import BITS, gate_backward, log_decay, parameters
from flash_delta.kernels.triton.chunk import find_chunk, follow, lead, load_block, load_tile, rows_of, store_tile
from flash_delta.kernels.triton.gradients import norm_backward

MILD = tl.constexpr(110.0)  # bits, 76 nats: 2^110 times a key fits bfloat16; 15 tokens at the lower bound have 108


@triton.jit
def load_channels(x, strides, token, stop, c, K: tl.constexpr):
    """``[W, 16]``: channels c of 16 tokens."""
    o = tl.arange(0, 16)
    at = o[None, :] * strides[1] + c[:, None] * strides[3]  # short: 64 bits would be registers
    first = x + token.to(tl.int64) * strides[1]
    return tl.load(first + at, mask=(c < K)[:, None] & (token + o < stop)[None, :], other=0.0)


@triton.jit
def load_scores(x, I: tl.constexpr, J: tl.constexpr, C: tl.constexpr):
    return load_block(x, 16 * I, 16 * J, C, C, 16, 16)


@triton.jit
def sum_of(x, carried, PARTS: tl.constexpr):
    """Column t: the sum of those x whose row of ``carried [16, 16]`` has t. x in parts of 8 bits, exact products."""
    ones = carried.to(tl.bfloat16)
    part = x.to(tl.bfloat16)
    out = tl.dot(part, ones)
    for _ in tl.static_range(PARTS - 1):
        x -= part.to(tl.float32)
        part = x.to(tl.bfloat16)
        out = tl.dot(part, ones, out)
    return out


@triton.jit
def columns(aq, ap, qe, pe, ke, dP, dL, PRECISION: tl.constexpr):
    """Adds to ``aq`` and ``ap`` what the columns ``ke`` say to the rows; and what the rows ``qe``, ``pe`` say back."""
    aq = tl.dot(ke, tl.trans(dP), aq, input_precision=PRECISION)
    ap = tl.dot(ke, tl.trans(dL), ap, input_precision=PRECISION)
    back = tl.dot(qe, dP, input_precision=PRECISION)
    back = tl.dot(pe, dL, back, input_precision=PRECISION)
    return aq, ap, back


@triton.jit
def halves(zq, zk, dg, q, k, g, dP, dL, half, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Adds what every earlier half of ``2 half`` tokens and the later one say to each other."""
    o = tl.arange(0, 16)
    r, c = o[:, None], o[None, :]
    middle = (c & -half) | half
    carried = ((middle < r) & (r <= c)) | ((c < r) & (r <= middle))  # by token c, gate r
    e = tl.exp2(sum_of(g, carried, PARTS))
    ke, qe = (k * e).to(k.dtype), (q * e).to(q.dtype)
    below = (((r ^ c) & -half) == half) & (r > c)
    dP, dL = tl.where(below, dP, 0.0), tl.where(below, dL, 0.0)
    aq = tl.dot(ke, tl.trans(dP), input_precision=PRECISION)
    ak = tl.dot(qe, dP, input_precision=PRECISION)
    ak = tl.dot(ke, dL + tl.trans(dL), ak, input_precision=PRECISION)  # later keys erase, earlier ones write
    dg += sum_of(qe.to(tl.float32) * aq + ke.to(tl.float32) * ak, tl.trans(carried.to(tl.int32)), 3)
    return zq + e * aq, zk + e * ak, dg


@triton.jit
def within(
    aq, ap, zq, zk, dg, qe, pe, q, k, g, grown, dP, dL, BOUNDED: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the tokens of one block say to each other; also returns what to take from the sums of rows."""
    o = tl.arange(0, 16)
    below = o[:, None] > o[None, :]
    dP, dL = tl.where(below, dP, 0.0), tl.where(below, dL, 0.0)
    y = tl.zeros(aq.shape, tl.float32)
    mild = k.dtype == tl.bfloat16  # float16 has no such numbers, float32 more digits than a difference leaves
    if mild and not BOUNDED:
        mild = tl.min(grown) >= -MILD
    if mild:
        fall = tl.exp2(-grown)
        ke = (k * fall).to(k.dtype)
        aq, ap, back = columns(aq, ap, qe, pe, ke, dP, dL, PRECISION)
        zk, y = zk + fall * back, ke.to(tl.float32) * back
    else:
        for level in range(4):
            zq, zk, dg = halves(zq, zk, dg, q, k, g, dP, dL, 1 << level, PARTS, PRECISION)
    return aq, ap, zq, zk, y, dg


@triton.jit
def replaced(xs, J: tl.constexpr, x):
    return xs[:J] + (x,) + xs[J + 1 :]  # noqa: RUF005 (Triton)


@triton.jit
def earlier(
    aq, ap, zks, over, qe, pe, kes, between, dPD, taken, I: tl.constexpr, J: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the columns of block J and the rows of block I behind it say to each other."""
    dP, dL = load_scores(dPD, I, J, C), -load_scores(taken, I, J, C)
    fall = tl.exp2(between)[:, None]
    ke = (kes[J] * fall).to(qe.dtype)
    aq, ap, back = columns(aq, ap, qe, pe, ke, dP, dL, PRECISION)
    for T in tl.static_range(J + 1, I):
        over = replaced(over, T, over[T] + tl.sum(ke.to(tl.float32) * back, 1))
    return aq, ap, replaced(zks, J, zks[J] + fall * back), over


@triton.jit
def load_gates(
    g, k, g_strides, k_strides, rate, bias, lower_bound, token, stop, c, K: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of four blocks: k, decayed up to the block's end; in bits the log decay of the first token, of the block, of the
    blocks before it."""
    o = tl.arange(0, 16)
    kes, firsts, totals, starts = (), (), (), (tl.zeros(c.shape, tl.float32),)
    for J in tl.static_range(4):
        at = token + 16 * J
        some = (c < K)[:, None] & (at + o < stop)[None, :]
        a = load_channels(g, g_strides, at, stop, c, K)
        gj = log_decay(a, rate[:, None], bias[:, None], some, lower_bound, BITS, RAW_GATE, BOUNDED)
        kes += (load_channels(k, k_strides, at, stop, c, K) * tl.exp2(sum_of(gj, o[:, None] > o[None, :], PARTS)),)
        firsts += (tl.sum(tl.where((o == 0)[None, :], gj, 0.0), 1),)
        totals += (tl.sum(gj, 1),)
        starts += (starts[J] + totals[J],)
    return kes, firsts, totals, starts


@triton.jit
def write(z, ds1, U, J: tl.constexpr, w, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr):
    u = load_block(U, 16 * J, w, C, V, 16, BV)
    return tl.dot(tl.trans(ds1), tl.trans(u), z, input_precision=PRECISION)


@triton.jit
def writes(
    kes, totals, U, states, dstates, norms, column, K: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the tokens of four blocks write into the state: of dk, but for the decay up to the block's end; the sums of
    k . dk; and rows of S0 . dS1."""
    z0, z1 = tl.zeros([W, 16], tl.float32), tl.zeros([W, 16], tl.float32)
    z2, z3 = tl.zeros([W, 16], tl.float32), tl.zeros([W, 16], tl.float32)
    through = tl.zeros([W], tl.float32)
    for w in range(0, V, BV):
        ds1 = load_block(dstates, w, column, V, K, BV, W)
        through += tl.sum(load_block(states, w, column, V, K, BV, W).to(tl.float32) * ds1.to(tl.float32), 0)
        z0, z1 = write(z0, ds1, U, 0, w, C, V, BV, PRECISION), write(z1, ds1, U, 1, w, C, V, BV, PRECISION)
        z2, z3 = write(z2, ds1, U, 2, w, C, V, BV, PRECISION), write(z3, ds1, U, 3, w, C, V, BV, PRECISION)
    zks, wrote, rest = (z0, z1, z2, z3), (), tl.zeros([W], tl.float32)
    for back in tl.static_range(4):
        z = zks[3 - back] * tl.exp2(rest)[:, None]
        if NORM:
            z *= tl.load(norms + C + 16 * (3 - back) + tl.arange(0, 16))[None, :]
        zks, wrote = replaced(zks, 3 - back, z), (tl.sum(kes[3 - back] * z, 1),) + wrote  # noqa: RUF005 (Triton)
        rest += totals[3 - back]
    return zks, wrote, through


@triton.jit
def reads(
    do, do_strides, dU, states, token, stop, i, column, K: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What 16 tokens, of the chunk those from i on, read and erase in the state: S0 dO^T and S0 dU^T, ``[W, 16]``."""
    read, erased = tl.zeros([W, 16], tl.float32), tl.zeros([W, 16], tl.float32)
    for w in range(0, V, BV):
        s0 = load_block(states, w, column, V, K, BV, W)
        dO = load_tile(do, do_strides, token, stop, w, V, 16, BV)
        read = tl.dot(tl.trans(s0), tl.trans(dO), read, input_precision=PRECISION)
        lam = load_block(dU, i, w, C, V, 16, BV)
        erased = tl.dot(tl.trans(s0), tl.trans(lam), erased, input_precision=PRECISION)
    return read, erased


@triton.jit(do_not_specialize=["N", "T"])
def channel_gradients(
    q, k, g, A_log, dt_bias, do, U, dU, states, dstates, dPD, taken, vectors, norms, cu_seqlens,
    dq, dk, dg, dA_log, ddt_bias, N, T, scale, lower_bound, q_strides, k_strides, g_strides, do_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, W: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dg; of one value head dq and dk (with a norm, r dy), ``[slots, HV, C, K]``; of A_log and dt_bias ``[slots, HV,
    K]``, to be summed."""
    lead(OVERLAP)
    follow(OVERLAP)
    BLOCKS: tl.constexpr = (K + W - 1) // W  # of channels
    part, slot, hv = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    o, c = tl.arange(0, 16), part * W + tl.arange(0, W)
    ty: tl.constexpr = k.dtype.element_ty
    PARTS: tl.constexpr = 2 if ty == tl.bfloat16 else 3  # what e^-76 gets wrong is nothing
    head, h = slot.to(tl.int64) * HV + hv, hv // (HV // H)
    strides = (T.to(tl.int64) * HV * K, HV * K, K, 1)
    dg, sums = rows_of(dg, strides, row, hv), head * K + c
    zero = tl.zeros([W, 16], tl.float32)
    if PACKED:  # noqa: SIM102 (a constant, then a number)
        if (token >= stop) | (n >= N):  # behind the last sequence; without a chunk, no row is stored
            store_tile(dg, strides, tl.zeros([C, W], tl.float32), token, stop, part * W, K, C, W)
            if HAS_A:
                tl.store(dA_log + sums, 0.0, mask=c < K)
            if HAS_BIAS:
                tl.store(ddt_bias + sums, 0.0, mask=c < K)
            return
    q, k = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
    g, do = rows_of(g, g_strides, row, hv), rows_of(do, do_strides, row, hv)
    U, dU, dPD, taken = U + head * C * V, dU + head * C * V, dPD + head * C * C, taken + head * C * C
    rate, bias = parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    kes, firsts, totals, starts = load_gates(
        g, k, g_strides, k_strides, rate, bias, lower_bound, token, stop, c, K, RAW_GATE, BOUNDED, PARTS
    )
    states, dstates = states + head * V * K, dstates + head * V * K
    if NORM:
        norms += (slot.to(tl.int64) * H + h) * 3 * C
    zks, wrote, after = writes(kes, totals, U, states, dstates, norms, part * W, K, W, V, BV, C, NORM, PRECISION)
    # what carries all gates of a block: first what goes from state to state, then also what is read behind it
    after *= tl.exp2(starts[4])
    dA, dbias = tl.zeros([W], tl.float32), tl.zeros([W], tl.float32)
    over = (dA, dA, dA, dA)  # what rows behind a block say to columns before it
    for back in tl.static_range(4):
        at = token + 16 * (3 - back)
        live = (c < K)[:, None] & (at + o < stop)[None, :]
        a = load_channels(g, g_strides, at, stop, c, K)  # and made again: fewer registers
        decay = log_decay(a, rate[:, None], bias[:, None], live, lower_bound, 1.0, RAW_GATE, BOUNDED)
        kk, gi = load_channels(k, k_strides, at, stop, c, K), decay * BITS
        qq = load_channels(q, q_strides, at, stop, c, K)
        grown = sum_of(gi, (o[:, None] > 0) & (o[:, None] <= o[None, :]), PARTS)
        e = tl.exp2(grown)
        qe, pe = (qq * e).to(ty), (kk * e).to(ty)
        dP, dL = load_scores(dPD, 3 - back, 3 - back, C), -load_scores(taken, 3 - back, 3 - back, C)
        # the state first: of its tiles only sums are kept
        start = e * tl.exp2(starts[3 - back] + firsts[3 - back])[:, None]  # e^G
        read, erased = reads(do, do_strides, dU, states, at, stop, 16 * (3 - back), part * W, K, W, V, BV, C, PRECISION)
        read, erased = read * start * scale, erased * start
        erased *= tl.load(vectors + head * 4 * C + 2 * C + 16 * (3 - back) + o)[None, :]  # b
        if NORM:
            norm = norms + 16 * (3 - back) + o
            read, erased = read * tl.load(norm)[None, :], erased * tl.load(norm + C)[None, :]
        of_state = qq * read - kk * erased
        zk = zks[3 - back] * tl.exp2(sum_of(gi, o[:, None] > o[None, :], PARTS))  # by the state and later blocks
        d = sum_of(of_state, o[:, None] >= o[None, :], 3) + sum_of(kk * zk, o[:, None] < o[None, :], 3)
        through = after + over[3 - back]
        for J in tl.static_range(3 - back):
            through += wrote[J]
        d += through[:, None]
        after += tl.sum(of_state, 1)
        own = tl.sum(tl.where(o[:, None] == o[None, :], dP, 0.0), 0).to(tl.float32)[None, :]  # carries no gate
        zq, zk = read + own * kk, zk - erased + own * qq
        aq, ap, between = zero, zero, firsts[3 - back]
        for down in tl.static_range(3 - back):
            aq, ap, zks, over = earlier(
                aq, ap, zks, over, qe, pe, kes, between, dPD, taken, 3 - back, 2 - back - down, C, PRECISION
            )
            between += totals[2 - back - down]
        aq, ap, zq, zk, y, d = within(aq, ap, zq, zk, d, qe, pe, qq, kk, gi, grown, dP, dL, BOUNDED, PARTS, PRECISION)
        rows = head * C * K + 16 * (3 - back) * K
        store_channels(dq + rows, zq + e * aq, c, K)
        store_channels(dk + rows, zk + e * ap, c, K)
        d += sum_of(qe.to(tl.float32) * aq + pe.to(tl.float32) * ap - y, o[:, None] >= o[None, :], 3)
        if RAW_GATE:
            d, of_A_log = gate_backward(d, decay, a, rate[:, None], bias[:, None], live, BOUNDED)
            dA += tl.sum(of_A_log, 1)
            dbias += tl.sum(d, 1)
        store_tile(dg, strides, tl.trans(d).to(dg.dtype.element_ty), at, stop, part * W, K, 16, W)
    if HAS_A:
        tl.store(dA_log + sums, dA, mask=c < K)
    if HAS_BIAS:
        tl.store(ddt_bias + sums, dbias, mask=c < K)


@triton.jit
def sum_heads(parts, first, HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """``[C, BK]``: the sum over the value heads of a key head, of which ``first`` is the first."""
    z = tl.zeros([C, BK], tl.float32)
    for member in range(HV // H):
        z += load_block(parts + (first + member) * C * K, 0, 0, C, K, C, BK).to(tl.float32)
    return z


@triton.jit(do_not_specialize=["N", "T"])
def key_head_gradients(
    q, k, norms, cu_seqlens, dq_parts, dk_parts, dq, dk, N, T, q_strides, k_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dq and dk of a key head from those of its value heads, through the norm. Grid (slots, H)."""
    lead(OVERLAP)
    follow(OVERLAP)
    slot, h = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    strides = (T.to(tl.int64) * H * K, H * K, K, 1)
    dq, dk = rows_of(dq, strides, row, h), rows_of(dk, strides, row, h)
    if PACKED:  # noqa: SIM102 (a constant, then a number)
        if (token >= stop) | (n >= N):  # behind the last sequence; without a chunk, no row is stored
            store_tile(dq, strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
            store_tile(dk, strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
            return
    first = slot.to(tl.int64) * HV + h * (HV // H)
    z = sum_heads(dq_parts, first, HV, H, K, BK, C)
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * 3 * C + i
        qq = load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK)
        z = norm_backward(z, qq, tl.load(norm))
    store_tile(dq, strides, z.to(ty), token, stop, 0, K, C, BK)
    z = sum_heads(dk_parts, first, HV, H, K, BK, C)
    if NORM:
        kk = load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK)
        z = norm_backward(z, kk, tl.load(norm + C))
    store_tile(dk, strides, z.to(ty), token, stop, 0, K, C, BK)
