"""Stages ``cumulate`` and ``scores`` with a decay per key channel: all that a chunk's tokens are to each other.

    Qg = q . e^G      Kg = k . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}
    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc   i >= j           L_ij = sum_c k_ic e^{G_ic - G_jc} k_jc   i > j

Norms, and the scale, are in P and L but not in the others: as without a decay per channel `scan` applies them to
accumulators (``rates``).

A decay per channel has to be split between the two factors of a score, ``(q e^{G_i - r}) (k e^{r - G_j})``. Rows come
in blocks of 16 tokens, and r is G at a block's first token, for the columns of the other half G at that half's end: for
the columns of earlier blocks both factors are at most 1, and no r lies behind a row that it touches, so that no token
ever changes what comes before it, not by a bit. Within the block the second factor reaches e^{r - G_j}, which float32
and bfloat16 hold as long as no channel falls by more than 76 nats; rows below that are computed again from explicit
differences (``explicit_scores``), if there are any.

One thread owns two neighbouring channels, which it loads and stores as one word, and a tile is 16 vectors of channels,
one per token: sums over tokens stay in a register, and are summed for the differences that are needed, so that nothing
cancels. Exponents are in bits (log2).

Writes Qg, Kg, Kd ``[slots, HV, C, K]``, P, L ``[slots, HV, C, C]`` (of L the blocks on and below the diagonal; in
float16 where inputs have 16 bits, as `solve` multiplies), gamma ``[slots, HV, K]``; what `solve` writes without a decay
per channel: b, row 2 of ``vectors [slots, HV, 4, C]``, and norms, the same bits where these were saved; and what
`factor` does: ``rates [slots, HV, 4, C]``, the norms of q, with the scale, and of k, and b. Grid (slots HV).
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.channel_gate import BITS, log_decay, parameters
from flash_delta.kernels.triton.chunk import find_chunk, lead, load_block, load_tile, rows_of
from flash_delta.kernels.triton.solve import cumulate

# Bits that a channel falls within a block of 16 tokens; e^-76 is 2^-109.6, and with a bounded gate it is e^-75 at most.
# Sums are rounded in different orders: a row that is unsafe by its own sum always sees to it that it is looked at, and
# one that is safe finds all its columns.
LOOK = tl.constexpr(-109.0)
UNSAFE = tl.constexpr(-110.0)
DROP = tl.constexpr(112.0)


@triton.jit
def reciprocal_lengths(
    x, strides, token, stop, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr
):
    """``(sum x^2 + eps)^{-1/2}`` of the rows of a chunk, [C]: from the products of 16 rows with each other."""
    B: tl.constexpr = C // 16
    b, i, c = tl.arange(0, B)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, W)[None, None, :]
    j = token + 16 * b + i
    squares = tl.zeros([B, 16, 16], tl.float32)
    for column in range(0, K, W):
        at = j.to(tl.int64) * strides[1] + (column + c) * strides[3]
        tile = tl.load(x + at, mask=(j < stop) & (column + c < K), other=0.0)
        squares = tl.dot(tile, tl.permute(tile, (0, 2, 1)), squares, input_precision=PRECISION)
    squares = tl.sum(tl.where(i == tl.arange(0, 16)[None, None, :], squares, 0.0), 2)
    return tl.rsqrt(tl.reshape(squares, [C]) + 1e-6)


@triton.jit
def load_rows(x, strides, token, stop, c, K: tl.constexpr):
    """16 vectors of channels, one per token, as they are."""
    rows, at = (), x + token.to(tl.int64) * strides[1] + c * strides[3]
    for m in tl.static_range(16):
        rows += (tl.load(at, mask=c < tl.where(token + m < stop, K, 0), other=0.0),)
        at += strides[1]
    return rows


@triton.jit
def behind(gates):
    """Of 16 vectors: the sums of those behind each one."""
    out = (tl.zeros(gates[0].shape, tl.float32),)
    for m in tl.static_range(1, 16):
        out = (out[0] + gates[16 - m],) + out  # noqa: RUF005 (Triton knows no star)
    return out


@triton.jit
def decayed(x, exponents):
    y = ()
    for m in tl.static_range(16):
        y += (x[m].to(tl.float32) * tl.exp2(exponents[m]),)
    return y


@triton.jit
def times(x, factor):
    y = ()
    for m in tl.static_range(16):
        y += (x[m] * factor,)
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
def store_rows(out, x, c, K: tl.constexpr):
    """16 vectors as 16 rows of K channels from ``out`` on."""
    for m in tl.static_range(16):
        tl.store(out + m * K + c, x[m].to(out.dtype.element_ty), mask=c < K)


@triton.jit
def multiply(
    P, L, norms, rows, weights, columns, I, J, DIAGONAL: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the block of P and L in row block I and column block J.

    ``rows [32, W]``: of q and k in turn; ``weights [32, 1]``: their norms, and the scale.
    """
    scores = tl.dot(rows, columns, input_precision=PRECISION)
    r, o = tl.arange(0, 32)[:, None], tl.arange(0, 16)[None, :]
    if DIAGONAL:
        scores = tl.where(r // 2 >= o + r % 2, scores, 0.0)
    scores *= weights
    if NORM:
        scores *= tl.load(norms + C + 16 * J + o)
    at = (16 * I + r // 2) * C + 16 * J + o
    tl.store(P + at, scores.to(P.dtype.element_ty), mask=r % 2 == 0)
    tl.store(L + at, scores.to(L.dtype.element_ty), mask=r % 2 == 1)


@triton.jit
def pairs_of(q, k, W: tl.constexpr):
    """``[32, W]``: rows of q and k in turn, each from 16 vectors."""
    return tl.trans(joined(tl.join(tile_of(q), tile_of(k)), W, 32))


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


@triton.jit
def block(
    q_rows, k_rows, Qg, Kg, Kd, P, L, norms, G, since, g, early, I, at, stop, c, rate, bias, scale, lower_bound,
    q_strides, k_strides, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block I of 16 tokens, with its ``g``; ``early``: the block before's k, decayed up to its end.

    Returns this block's, G at its end, the sum of the half's gates so far, and how far a channel fell.
    """
    ty: tl.constexpr = k_rows.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if ty == tl.float16 else ty  # e^76 is too much for float16
    k, q = load_rows(k_rows, k_strides, at, stop, c, K), load_rows(q_rows, q_strides, at, stop, c, K)
    fallen = tl.zeros([BK], tl.float32)  # since the block's first token
    if I % 2 == 0:
        since = tl.zeros([BK], tl.float32)
    gates, qe, ke, own = (), (), (), ()
    for m in tl.static_range(16):  # token by token: few numbers at a time
        gates += (log_decay(g[m], rate, bias, at + m < stop, lower_bound, BITS, RAW_GATE, BOUNDED),)
        if m == 0:
            G += gates[0]
            since += gates[0]
            e_start = tl.exp2(G)
        else:
            fallen += gates[m]
        e = tl.exp2(fallen)
        qe += (q[m].to(tl.float32) * e,)
        ke += (k[m].to(tl.float32) * e,)
        tl.store(Qg + (16 * I + m) * K + c, (qe[m] * e_start).to(ty), mask=c < K)
        tl.store(Kg + (16 * I + m) * K + c, (ke[m] * e_start).to(ty), mask=c < K)
        grown = -fallen
        if not BOUNDED:  # 0 where it is too large: these columns belong to unsafe rows only
            grown = tl.where(grown > DROP, -1024.0, grown)
        own += (k[m].to(tl.float32) * tl.exp2(grown),)
    rows = pairs_of(qe, ke, BK).to(WIDE)
    r = tl.arange(0, 32)[:, None]
    weights = tl.where(r % 2 == 0, scale, 1.0)
    if NORM:
        weights *= tl.load(norms + r % 2 * C + 16 * I + r // 2)
    multiply(P, L, norms, rows, weights, tile_of(own).to(WIDE), I, I, True, C, NORM, PRECISION)
    if I >= 2:
        e_since = tl.exp2(since)
        far = pairs_of(times(qe, e_since), times(ke, e_since), BK).to(ty)
        for J in range(2):
            columns = tl.trans(load_block(Kd, 16 * J, 0, C, K, 16, BK))
            multiply(P, L, norms, far, weights, columns, I, J, False, C, NORM, PRECISION)
    # 2^fallen is exact to 1e-5 in this product
    latest = times(own, tl.exp2(fallen)) if BOUNDED and ty != tl.float32 else decayed(k, behind(gates))
    if I % 2 == 1:
        near = tile_of(times(early, tl.exp2(gates[0]))).to(ty)
        multiply(P, L, norms, rows.to(ty), weights, near, I, I - 1, False, C, NORM, PRECISION)
        store_rows(Kd + 16 * (I - 1) * K, times(early, tl.exp2(gates[0] + fallen)), c, K)
        store_rows(Kd + 16 * I * K, latest, c, K)
        tl.debug_barrier()  # Kd is read by other threads
    return latest, G + fallen, since + fallen, fallen


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
    slot, hv = tl.program_id(0) // HV, tl.program_id(0) % HV  # what lies side by side in memory is read at once
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
    i, c = tl.arange(0, C), tl.arange(0, BK)
    q_rows, k_rows = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
    g_rows = rows_of(g, g_strides, row, hv)
    g_next = load_rows(g_rows, g_strides, token, stop, c, K)
    of_q, of_k, rates = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32), rates + head * 4 * C + i
    if NORM:  # every value head writes the same numbers
        W: tl.constexpr = BK
        norms += (slot.to(tl.int64) * H + h) * 3 * C
        of_q = reciprocal_lengths(q_rows, q_strides, token, stop, K, C, W, PRECISION)
        of_k = reciprocal_lengths(k_rows, k_strides, token, stop, K, C, W, PRECISION)
        tl.store(norms + i, of_q)
        tl.store(norms + C + i, of_k)
        tl.store(norms + 2 * C + i, of_k)
    tl.store(rates, of_q * scale)
    tl.store(rates + C, of_k)
    tl.store(rates + 2 * C, b)
    tl.debug_barrier()  # what was written above is read below, by other threads
    P, L, tile = P + head * C * C, L + head * C * C, head * C * K
    tl.store(P + i[:, None] * C + i[None, :], tl.zeros([C, C], ty), mask=i[:, None] // 16 < i[None, :] // 16)
    rate, bias = parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    G, since, lowest = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    stop = tl.minimum(stop, token + C)
    early = ()
    for _ in tl.static_range(16):
        early += (tl.zeros([BK], tl.float32),)
    for I in range(
        C // 16
    ):  # not unrolled: instructions have a cache, too, and Triton's passes are slow in long bodies
        at, g_block = token + 16 * I, g_next
        early, G, since, fell = block(
            q_rows, k_rows, Qg + tile, Kg + tile, Kd + tile, P, L, norms, G, since, g_block, early, I, at, stop, c, rate,
            bias, scale, lower_bound, q_strides, k_strides, K, BK, C, RAW_GATE, BOUNDED, NORM, PRECISION,
        )  # fmt: skip
        g_next = load_rows(g_rows, g_strides, at + 16, stop, c, K)
        lowest = tl.minimum(lowest, fell)
    tl.store(gamma + head * K + c, tl.exp2(G), mask=c < K)
    # so far the first half is decayed up to its own end
    HALF: tl.constexpr = C // 2
    early, j = load_block(Kd + tile, 0, 0, C, K, HALF, BK), tl.arange(0, HALF)[:, None]
    early = (early * tl.exp2(since)[None, :]).to(ty)
    tl.store(Kd + tile + j * K + c[None, :], early, mask=(c < K)[None, :])
    if not BOUNDED:  # noqa: SIM102 (a constant, then a number)
        if tl.min(tl.where(c < K, lowest, 0.0), 0) < LOOK:
            tl.debug_barrier()  # rows that were written above are written again, by other threads
            explicit_scores(
                q_rows, k_rows, g_rows, A_log, dt_bias, P, L, norms, hv, token, stop, scale, lower_bound, q_strides,
                k_strides, g_strides, K, min(BK, 32), C, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS, NORM,
            )  # fmt: skip
