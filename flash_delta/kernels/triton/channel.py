"""Stages ``cumulate`` and ``scores`` with a decay per key channel: all that a chunk's tokens are to each other.

    Qg = scale q . e^G      Kg = k . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}
    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc   i >= j           L_ij = sum_c k_ic e^{G_ic - G_jc} k_jc   i > j

A decay per channel has to be split between the two factors of a score, ``(q e^{G_i - r}) (k e^{r - G_j})``. Rows come
in blocks of 16 tokens, and r is G at a block's first token: for the columns of earlier blocks both factors are at most
1, and no r lies behind a row that it touches, so that no token ever changes what comes before it, not by a bit. Within
the block the second factor reaches e^{r - G_j}, which float32 and bfloat16 hold as long as no channel falls by more
than 76 nats; rows below that are computed again from explicit differences (``explicit_scores``), if there are any.

One thread owns a channel, and a tile is 16 vectors of channels, one per token: sums over tokens stay in a register, and
are summed from either end, for the differences that are needed, so that nothing cancels. Exponents are in bits (log2).
The columns of earlier blocks stay in registers, too: from one block to the next all of them fall by the same factor.

Writes Qg, Kg, Kd ``[slots, HV, C, K]``, P, L ``[slots, HV, C, C]`` (of L the blocks on and below the diagonal; in
float16 where inputs have 16 bits, as `solve` multiplies), gamma ``[slots, HV, K]``; what `solve` writes without a decay
per channel: b, row 2 of ``vectors [slots, HV, 4, C]``, and norms, the same bits where these were saved; and what
`factor` does: ``rates [slots, HV, 4, C]``, of which b alone is not 1. Grid (slots, HV).
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.channel_gate import BITS, log_decay, parameters
from flash_delta.kernels.triton.chunk import find_chunk, lead, load_tile, rows_of
from flash_delta.kernels.triton.solve import cumulate, reciprocal_lengths

# Bits that a channel falls within a block of 16 tokens; e^-76 is 2^-109.6, and with a bounded gate it is e^-75 at most.
# Sums are rounded in different orders: a row that is unsafe by its own sum always sees to it that it is looked at, and
# one that is safe finds all its columns.
LOOK = tl.constexpr(-109.0)
UNSAFE = tl.constexpr(-110.0)
DROP = tl.constexpr(112.0)


@triton.jit
def load_rows(x, strides, token, stop, c, K: tl.constexpr):
    """16 vectors of channels, one per token, as they are."""
    rows, at = (), x + token.to(tl.int64) * strides[1] + c * strides[3]
    for m in tl.static_range(16):
        rows += (tl.load(at, mask=c < tl.where(token + m < stop, K, 0), other=0.0),)
        at += strides[1]
    return rows


@triton.jit
def scaled(x, norms, at, factor, NORM: tl.constexpr):
    """In float32, times ``factor``, and normalised with ``norms[at:]``."""
    rows = ()
    for m in tl.static_range(16):
        r = x[m].to(tl.float32) * factor
        if NORM:
            r *= tl.load(norms + at + m)
        rows += (r,)
    return rows


@triton.jit
def log_decays(
    a, token, stop, c, K: tl.constexpr, rate, bias, lower_bound, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr
):
    """The log decays in bits."""
    rows = ()
    for m in tl.static_range(16):
        live = c < tl.where(token + m < stop, K, 0)
        rows += (log_decay(a[m], rate, bias, live, lower_bound, BITS, RAW_GATE, BOUNDED),)
    return rows


@triton.jit
def sums(g):
    """Of 16 vectors: those behind the first one up to each, and those behind each one."""
    zero = tl.zeros(g[0].shape, tl.float32)
    before, behind = (zero,), (zero,)
    for m in tl.static_range(1, 16):
        before += (before[m - 1] + g[m],)
        behind = (behind[0] + g[16 - m],) + behind  # noqa: RUF005 (Triton knows no star)
    return before, behind


@triton.jit
def decayed(x, exponents):
    y = ()
    for m in tl.static_range(16):
        y += (x[m] * tl.exp2(exponents[m]),)
    return y


@triton.jit
def grown(x, exponents, BOUNDED: tl.constexpr):
    """``x 2^-exponent``, 0 where that is too large: these columns belong to unsafe rows only. BOUNDED has none."""
    y = ()
    for m in tl.static_range(16):
        e = -exponents[m]
        if not BOUNDED:
            e = tl.where(e > DROP, -1024.0, e)
        y += (x[m] * tl.exp2(e),)
    return y


@triton.jit
def quarter(x, m: tl.constexpr):
    return tl.join(tl.join(x[m], x[m + 8]), tl.join(x[m + 4], x[m + 12]))


@triton.jit
def tile_of(x):
    """``[W, 16]`` from 16 vectors [W], without moving a number: a thread keeps its channels."""
    t = tl.join(tl.join(quarter(x, 0), quarter(x, 2)), tl.join(quarter(x, 1), quarter(x, 3)))
    return joined(t, x[0].shape[0], 16)


@triton.jit
def joined(t, W: tl.constexpr, n: tl.constexpr):
    """``[W, n]``. The sum over one number hides the joins, which Triton takes for a packed format's: slow layouts."""
    return tl.sum(tl.reshape(t, [W, 1, n]), 1)


@triton.jit
def store_channels(out, x, c, K: tl.constexpr):
    """``x [W, 16]`` as 16 rows of K channels from ``out`` on."""
    o = tl.arange(0, 16)
    tl.store(out + o[None, :] * K + c[:, None], x.to(out.dtype.element_ty), mask=(c < K)[:, None])


@triton.jit
def multiply(P, L, rows, columns, I, back: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Writes the block of P and L that lies ``back`` blocks before the diagonal one of row block ``I``, if it exists.

    ``rows [32, W]``: row 2 m belongs to P, row 2 m + 1 to L.
    """
    if back <= I:
        scores = tl.dot(rows, columns, input_precision=PRECISION)
        r, o = tl.arange(0, 32)[:, None], tl.arange(0, 16)[None, :]
        if back == 0:
            scores = tl.where(r // 2 >= o + r % 2, scores, 0.0)
        at = (16 * I + r // 2) * C + 16 * (I - back) + o
        tl.store(P + at, scores.to(P.dtype.element_ty), mask=r % 2 == 0)
        tl.store(L + at, scores.to(L.dtype.element_ty), mask=r % 2 == 1)


@triton.jit
def explicit_scores(
    q_rows, k_rows, g_rows, A_log, dt_bias, P, L, norms, hv, token, stop, scale, lower_bound, q_strides, k_strides,
    g_strides, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The unsafe rows of the diagonal blocks once more, column by column, from e^{G_i - G_j}: no exponent above 0."""
    o = tl.arange(0, 16)
    for block in range(C // 16):
        first = token + 16 * block
        p, l, lowest = tl.zeros([16, 16], tl.float32), tl.zeros([16, 16], tl.float32), tl.zeros([16], tl.float32)
        for column in range(0, K, W):
            c = column + tl.arange(0, W)
            rate, bias = parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
            qq = load_tile(q_rows, q_strides, first, stop, column, K, 16, W).to(tl.float32) * scale
            kk = load_tile(k_rows, k_strides, first, stop, column, K, 16, W).to(tl.float32)
            if NORM:
                qq *= tl.load(norms + 16 * block + o)[:, None]
                kk *= tl.load(norms + C + 16 * block + o)[:, None]
            D = tl.zeros([16, W], tl.float32)  # the decay of the tokens behind m, up to each row
            for back in range(16):
                m = 15 - back
                live = c < tl.where(first + m < stop, K, 0)
                r = tl.load(k_rows + (first + m).to(tl.int64) * k_strides[1] + c * k_strides[3], mask=live, other=0.0)
                r = r.to(tl.float32)
                if NORM:
                    r *= tl.load(norms + C + 16 * block + m)
                weights = tl.where(o[:, None] >= m, tl.exp2(D), 0.0) * r[None, :]
                p = tl.where(o[None, :] == m, p + tl.sum(qq * weights, 1)[:, None], p)
                l = tl.where(o[None, :] == m, l + tl.sum(kk * weights, 1)[:, None], l)
                a = tl.load(g_rows + (first + m).to(tl.int64) * g_strides[1] + c * g_strides[3], mask=live, other=0.0)
                decay = log_decay(a, rate, bias, live, lower_bound, BITS, RAW_GATE, BOUNDED)
                D = tl.where((o[:, None] >= m) & (m > 0), D + decay[None, :], D)
            lowest = tl.minimum(lowest, tl.min(D, 1))
        unsafe = (lowest < UNSAFE)[:, None]
        at = (16 * block + o)[:, None] * C + 16 * block + o[None, :]
        tl.store(P + at, p.to(P.dtype.element_ty), mask=unsafe & (o[:, None] >= o[None, :]))
        tl.store(L + at, l.to(L.dtype.element_ty), mask=unsafe & (o[:, None] > o[None, :]))


@triton.jit(do_not_specialize=["N", "T", "beta_batch"])
def channel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, Qg, Kg, Kd, P, L, gamma, rates, vectors, norms, N, T, scale,
    lower_bound, beta_top, q_strides, k_strides, g_strides, beta_batch, beta_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, hv = tl.program_id(0), tl.program_id(1)
    h = hv // (HV // H)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    if (token >= stop) | (n >= N):
        return
    head = slot.to(tl.int64) * HV + hv
    b = cumulate(
        g, beta, A_log, dt_bias, vectors + head * 4 * C, row, hv, token, stop, beta_top, (0, 0, 0),
        (beta_batch, beta_strides[0], beta_strides[1]), C, False, False, False, HAS_BETA, RAW_BETA,
    )  # fmt: skip
    ty: tl.constexpr = k.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if ty == tl.float16 else ty  # e^76 is too much for float16
    i, c, rates = tl.arange(0, C), tl.arange(0, BK), rates + head * 4 * C
    tl.store(rates + i, tl.full([C], 1.0, tl.float32))
    tl.store(rates + C + i, tl.full([C], 1.0, tl.float32))
    tl.store(rates + 2 * C + i, b)
    q_rows, k_rows = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
    g_rows = rows_of(g, g_strides, row, hv)
    if NORM:  # every value head writes the same numbers
        W: tl.constexpr = min(BK, 64)
        norms += (slot.to(tl.int64) * H + h) * 3 * C
        tl.store(norms + i, reciprocal_lengths(q_rows, q_strides, token, stop, K, C, W))
        lengths = reciprocal_lengths(k_rows, k_strides, token, stop, K, C, W)
        tl.store(norms + C + i, lengths)
        tl.store(norms + 2 * C + i, lengths)
        tl.debug_barrier()  # what was written above is read below, by other threads
    P, L, tile = P + head * C * C, L + head * C * C, head * C * K
    tl.store(P + i[:, None] * C + i[None, :], tl.zeros([C, C], ty), mask=i[:, None] // 16 < i[None, :] // 16)
    rate, bias = parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    G, fallen = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    lowest = tl.zeros([BK], tl.float32)
    # k e^{r - G} of the blocks before, [BK, 16]: the latest relative to its last token, the others to the first one of
    # the block that came last.
    before_3, before_2 = tl.zeros([BK, 16], tl.float32), tl.zeros([BK, 16], tl.float32)
    before_1, latest = tl.zeros([BK, 16], tl.float32), tl.zeros([BK, 16], tl.float32)
    g_next = load_rows(g_rows, g_strides, token, stop, c, K)
    k_next = load_rows(k_rows, k_strides, token, stop, c, K)
    stop = tl.minimum(stop, token + C)
    for I in range(C // 16):  # not unrolled: instructions have a cache, too
        at = token + 16 * I  # g and k come a block ahead; all else in an order that keeps few numbers at a time
        gg = log_decays(g_next, at, stop, c, K, rate, bias, lower_bound, RAW_GATE, BOUNDED)
        g_next = load_rows(g_rows, g_strides, at + 16, stop, c, K)
        before, behind = sums(gg)
        G += gg[0]  # at the block's first token
        fall, start = tl.exp2(fallen + gg[0])[:, None], tl.exp2(G)[:, None]
        before_3, before_2, before_1 = before_2 * fall, before_1 * fall, latest * tl.exp2(gg[0])[:, None]
        kk = scaled(k_next, norms, C + 16 * I, 1.0, NORM)
        k_next = load_rows(k_rows, k_strides, at + 16, stop, c, K)
        latest, own = tile_of(decayed(kk, behind)), tile_of(grown(kk, before, BOUNDED))
        kk = tile_of(decayed(kk, before))
        store_channels(Kg + tile + 16 * I * K, kk * start, c, K)
        qq = scaled(load_rows(q_rows, q_strides, at, stop, c, K), norms, 16 * I, scale, NORM)
        qq = tile_of(decayed(qq, before))
        store_channels(Qg + tile + 16 * I * K, qq * start, c, K)
        rows = tl.trans(joined(tl.join(qq, kk), BK, 32))  # [32, BK], q and k in turn
        multiply(P, L, rows.to(WIDE), own.to(WIDE), I, 0, C, PRECISION)
        multiply(P, L, rows.to(ty), before_1.to(ty), I, 1, C, PRECISION)
        multiply(P, L, rows.to(ty), before_2.to(ty), I, 2, C, PRECISION)
        multiply(P, L, rows.to(ty), before_3.to(ty), I, 3, C, PRECISION)
        fallen = before[15]
        G += fallen
        lowest = tl.minimum(lowest, fallen)
    last = tl.exp2(fallen)[:, None]
    store_channels(Kd + tile, before_3 * last, c, K)
    store_channels(Kd + tile + 16 * K, before_2 * last, c, K)
    store_channels(Kd + tile + 32 * K, before_1 * last, c, K)
    store_channels(Kd + tile + 48 * K, latest, c, K)
    tl.store(gamma + head * K + c, tl.exp2(G), mask=c < K)
    if not BOUNDED:  # noqa: SIM102 (a constant, then a number)
        if tl.min(lowest, 0) < LOOK:
            tl.debug_barrier()  # rows that were written above are written again, by other threads
            explicit_scores(
                q_rows, k_rows, g_rows, A_log, dt_bias, P, L, norms, hv, token, stop, scale, lower_bound, q_strides,
                k_strides, g_strides, K, min(BK, 32), C, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS, NORM,
            )  # fmt: skip
