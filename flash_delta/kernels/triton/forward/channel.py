"""Stages ``cumulate`` and ``scores`` with a decay per key channel: all products between the tokens of a chunk.

    Qg = q . e^G      Kg = k . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}
    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc   i >= j           L_ij = sum_c k_ic e^{G_ic - G_jc} k_jc   i > j

With a strength per channel tokens erase with b . k and write w . v. Then Kg and the rows of L have b . k in place of k,
and all else is the same. For the scans of the forward pass W = w . v is written.

P and L contain norms and the scale, and the others do not. As without a decay per channel, `scan` applies them to
accumulators (``rates``).

A decay per channel has to be split between the two factors of a score, ``(q e^{G_i - r}) (k e^{r - G_j})``. Rows come
in blocks of 16 tokens, and r is G at a block's first token. For the columns of earlier blocks both factors are at most
1. r never comes after its rows, so a token does not change any bit of earlier tokens. Within the block the second
factor is up to e^{r - G_j}. float32 and bfloat16 hold it as long as no channel decays by more than 76 nats. Rows with a
larger decay, if there are any, are computed again from explicit differences (``explicit_scores``).

One thread owns two neighbouring channels and stores them as one word. A tile is 16 vectors of channels, one per token.
So sums over tokens stay in a register. Differences of sums are summed directly, so that nothing cancels. Exponents are
in bits (log2).

Writes, with K' = pitch(K):

    Qg, Kg, Kd  [slots, HV, C, K']
    P           [slots, HV, C, C]
    L           [slots, HV, C, C]     only blocks on and below the diagonal; float16 if inputs have 16 bits, since
                                      `solve` multiplies in float16
    gamma       [slots, HV, K]
    rates       [slots, HV, 4, C]     norms of q times the scale; norms of k; b (otherwise from `factor`)
    vectors     [slots, HV, 4, C]     row 2: b (otherwise from `solve`)
    norms       [slots, H, 3, C]      (otherwise from `solve`); if they were saved, these are the same bits
    W           [B, T, HV, V]         with a strength per channel, in the forward pass

Grid (slots HV).
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_of
from flash_delta.kernels.device.chunk import count_slots, find_chunk, lead, load_block, load_tile, pitch, rows_of
from flash_delta.kernels.device.gates import BITS, channel_log_decay, channel_parameters, living
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, strides, strides_if, tokens
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import Channels, Solved
from flash_delta.kernels.triton.forward.solve import cumulate
from flash_delta.kernels.triton.forward.values import values_of, write_values
from flash_delta.kernels.triton.tiles import tile

# Bits by which a channel decays within a block of 16 tokens. A decay by 76 nats is 2^-109.6. With a bounded gate it is
# 75 nats at most. Three places compare such sums, which are rounded in different orders. So the limits differ: an
# unsafe row is always found, and a safe row has all its columns.
LOOK = tl.constexpr(-109.0)  # a chunk with less has its blocks looked at again
UNSAFE = tl.constexpr(-110.0)  # rows with less are stored again
DROP = tl.constexpr(112.0)  # a column with a larger inverse is 0


@triton.jit
def halves(tiles, W: tl.constexpr, n: tl.constexpr):
    """Splits every tile [W, 2 n] into its even and its odd columns, [W, n]. All even ones come first."""
    even, odd = (), ()
    for m in tl.static_range(len(tiles)):
        a, b = tl.split(tl.reshape(tiles[m], [W, n, 2]) if n > 1 else tl.reshape(tiles[m], [W, 2]))
        even += (a,)
        odd += (b,)
    return even + odd


@triton.jit
def vectors_of(tile, W: tl.constexpr):
    """The 16 rows of ``[16, W]``. A thread gets all tokens of its channels."""
    return halves(halves(halves(halves((tl.trans(tile),), W, 8), W, 4), W, 2), W, 1)


@triton.jit
def first_of(g, left, RAW_GATE: tl.constexpr):
    """The activations of the first ``left`` of 16 tokens."""
    out = ()
    for m in tl.static_range(16):
        out += (living(g[m], m < left, RAW_GATE),)
    return out


@triton.jit
def behind(gates):
    """Returns, for each of 16 vectors, the sum of the vectors after it."""
    out = (tl.zeros(gates[0].shape, tl.float32),)
    for m in tl.static_range(1, 16):
        out = (out[0] + gates[16 - m],) + out  # noqa: RUF005 (Triton has no star)
    return out


@triton.jit
def decayed(x, exponents):
    y = ()
    for m in tl.static_range(16):
        y += (x[m].to(tl.float32) * tl.exp2(exponents[m]),)
    return y


@triton.jit
def quarter(x, m: tl.constexpr):
    return tl.join(tl.join(x[m], x[m + 8]), tl.join(x[m + 4], x[m + 12]))


@triton.jit
def tile_of(x):
    """``[W, 16]`` from 16 vectors [W]. No number moves, since a thread keeps its channels."""
    t = tl.join(tl.join(quarter(x, 0), quarter(x, 2)), tl.join(quarter(x, 1), quarter(x, 3)))
    return joined(t, x[0].shape[0], 16)


@triton.jit
def joined(t, W: tl.constexpr, n: tl.constexpr):
    """``[W, n]``. The sum over one number hides the joins from Triton, which would choose slow layouts for them."""
    return tl.sum(tl.reshape(t, [W, 1, n]), 1)


@triton.jit
def store_rows(out, x, c, K: tl.constexpr):
    """Stores 16 vectors as 16 rows of K channels, from ``out`` on."""
    for m in tl.static_range(16):
        tl.store(out + m * K + c, x[m].to(out.dtype.element_ty), mask=c < K)


@triton.jit
def multiply(
    P, L, rows, columns, row_weights, column_weights, i, j, DIAGONAL: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the block of P and L that begins in row i and column j.

    ``rows [32, W]``: rows of q and k in turn; weights: their norms, and the scale, [32, 1] and [n].
    """
    scores = tl.dot(rows, columns, input_precision=PRECISION) * row_weights
    r, o = tl.arange(0, 32)[:, None], tl.arange(0, columns.shape[1])[None, :]
    if NORM:
        scores *= column_weights[None, :]
    if DIAGONAL:
        scores = tl.where(r // 2 >= o + r % 2, scores, 0.0)
    at = (i + r // 2) * C + j + o
    # One store for both, since their numbers have the same size. Each store first reorders numbers, with two barriers.
    WORD: tl.constexpr = tl.int16 if P.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    p, l = scores.to(P.dtype.element_ty), scores.to(L.dtype.element_ty)
    out: tl.constexpr = tl.pointer_type(WORD)
    tl.store(
        tl.where(r % 2 == 0, P.to(out, bitcast=True) + at, L.to(out, bitcast=True) + at),
        tl.where(r % 2 == 0, p.to(WORD, bitcast=True), l.to(WORD, bitcast=True)),
    )


@triton.jit
def pairs_of(q, k, W: tl.constexpr):
    """``[32, W]``: rows of q and k in turn, each from 16 vectors."""
    return tl.trans(joined(tl.join(tile_of(q), tile_of(k)), W, 32))


@triton.jit
def squares_of(x, zeros):
    """The sum of squares of 16 vectors; ``zeros``: see `channel`."""
    return [v.to(tl.float32) * v.to(tl.float32) + zeros for v in x]


@triton.jit
def reciprocal_lengths(q, k, zeros, W: tl.constexpr, PRECISION: tl.constexpr):
    """``(sum x^2 + eps)^{-1/2}`` of rows of q and k in turn, [32], each from 16 vectors.

    A product with ones sums over threads. In bfloat16 each square is rounded by at most 2^-9 of it, so the relative
    error of the sum is not larger.
    """
    WIDE: tl.constexpr = tl.float32 if k[0].dtype == tl.float16 else k[0].dtype
    squares = pairs_of(squares_of(q, zeros), squares_of(k, zeros), W).to(WIDE)
    sums = tl.dot(squares, tl.full([W, 16], 1.0, WIDE), input_precision=PRECISION)
    return tl.rsqrt(tl.max(sums, 1) + 1e-6)


@triton.jit
def explicit_scores(
    q_rows, k_rows, b_rows, g_rows, A_log, dt_bias, P, L, norms, hv, token, stop, scale, bound, beta_top, q_strides,
    k_strides, b_strides, g_strides, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Computes unsafe rows of the diagonal blocks again, column by column, from e^{G_i - G_j}, with no exponent above
    0."""
    o = tl.arange(0, 16)
    for block in range(C // 16):
        first = token + 16 * block
        p, l, lowest = tl.zeros([16, 16], tl.float32), tl.zeros([16, 16], tl.float32), tl.zeros([16], tl.float32)
        for column in range(0, K, W):
            c = column + tl.arange(0, W)
            rate, bias = channel_parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
            qq = load_tile(q_rows, q_strides, first, stop, column, K, 16, W).to(tl.float32) * scale
            kk = load_tile(k_rows, k_strides, first, stop, column, K, 16, W).to(tl.float32)
            if NORM:
                qq *= tl.load(norms + 16 * block + o)[:, None]
                kk *= tl.load(norms + C + 16 * block + o)[:, None]
            if b_rows is not None:
                kk *= strength_of(load_tile(b_rows, b_strides, first, stop, column, K, 16, W), beta_top, RAW_BETA)
            D = tl.zeros([16, W], tl.float32)  # the decay of the tokens after m, up to each row
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
                decay = channel_log_decay(living(a, live, RAW_GATE), rate, bias, bound, BITS, RAW_GATE, BOUNDED)
                D = tl.where((o[:, None] >= m) & (m > 0), D + decay[None, :], D)
            lowest = tl.minimum(lowest, tl.min(D, 1))
        unsafe = (lowest < UNSAFE)[:, None]
        at = (16 * block + o)[:, None] * C + 16 * block + o[None, :]
        tl.store(P + at, p.to(P.dtype.element_ty), mask=unsafe & (o[:, None] >= o[None, :]))
        tl.store(L + at, l.to(L.dtype.element_ty), mask=unsafe & (o[:, None] > o[None, :]))


@triton.jit
def token_block(
    q_tile, k_tile, b_tile, g_tile, Qg, Kg, Kd, P, L, rates, norms, zeros, G, since, early, I, left, c, rate, bias,
    scale, bound, beta_top, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block I of 16 tokens. ``left``: how many of them exist. ``early``: k of the block before, decayed up to its end.

    Returns this block's k, decayed up to its end; G there; the sum of the half's gates so far; and the sum of the
    block's gates after the first one.
    """
    ty: tl.constexpr = k_tile.dtype
    WIDE: tl.constexpr = tl.float32 if ty == tl.float16 else ty  # e^76 is too large for float16
    HALF: tl.constexpr = C // 2
    KP: tl.constexpr = pitch(K)
    i, o = 16 * I, tl.arange(0, 16)
    q, k, g = vectors_of(q_tile, BK), vectors_of(k_tile, BK), vectors_of(g_tile, BK)
    if b_tile is not None:
        b = vectors_of(b_tile, BK)
    of_q, of_k = tl.full([16], 1.0, tl.float32), tl.full([16], 1.0, tl.float32)
    if NORM:  # all value heads write the same numbers
        of_q, of_k = tl.split(tl.reshape(reciprocal_lengths(q, k, zeros, BK, PRECISION), [16, 2]))
        tl.store(norms + i + o, of_q)
        tl.store(norms + C + i + o, of_k)
        tl.store(norms + 2 * C + i + o, of_k)
    of_q *= scale
    tl.store(rates + i + o, of_q)
    tl.store(rates + C + i + o, of_k)
    weights = tl.reshape(tl.join(of_q, of_k), [32, 1])
    if left < 16:  # most blocks are whole
        g = first_of(g, left, RAW_GATE)
    fallen = zeros  # since the block's first token
    if I % 2 == 0:
        since = zeros
    gates, qe, ke, own = (), (), (), ()
    for m in tl.static_range(16):  # token by token: few numbers at a time
        gates += (channel_log_decay(g[m], rate, bias, bound, BITS, RAW_GATE, BOUNDED),)
        if m == 0:
            G += gates[0]
            since += gates[0]
            e_start = tl.exp2(G)
        else:
            fallen += gates[m]
        e = tl.exp2(fallen)
        qe += (q[m].to(tl.float32) * e,)
        if b_tile is None:
            ke += (k[m].to(tl.float32) * e,)
        else:
            ke += (k[m].to(tl.float32) * strength_of(b[m], beta_top, RAW_BETA) * e,)
        tl.store(Qg + (i + m) * KP + c, (qe[m] * e_start).to(ty), mask=c < KP)
        tl.store(Kg + (i + m) * KP + c, (ke[m] * e_start).to(ty), mask=c < KP)
        grown = fallen * -1.0  # not -x, which would be a separate instruction, 0 - x
        if not BOUNDED:  # 0 if it is too large, since only unsafe rows use these columns
            grown = tl.where(grown > DROP, -1024.0, grown)
        own += (k[m].to(tl.float32) * tl.exp2(grown),)
    rows = pairs_of(qe, ke, BK).to(WIDE)
    multiply(P, L, rows, tile_of(own).to(WIDE), weights, of_k, i, i, True, C, NORM, PRECISION)
    if I >= C // 32:
        # Other threads wrote this in earlier blocks. Since then all threads have waited for this block's tiles. The
        # load has to stay in a branch, or Triton's pipeliner would run it before the numbers are written.
        first = load_block(Kd, 0, 0, C, KP, HALF, BK)
        columns = tl.trans((first * tl.exp2(since)[None, :]).to(ty))
        norms_of = tl.load(norms + C + tl.arange(0, HALF)) if NORM else 1.0
        multiply(P, L, rows.to(ty), columns, weights, norms_of, i, 0, False, C, NORM, PRECISION)
    # 2^fallen is exact to 1e-5 in this product
    latest = [x * tl.exp2(fallen) for x in own] if BOUNDED and ty != tl.float32 else decayed(k, behind(gates))
    if I % 2 == 1:
        near = tile_of([x * tl.exp2(gates[0]) for x in early]).to(ty)
        norms_of = tl.load(norms + C + i - 16 + o) if NORM else 1.0
        multiply(P, L, rows.to(ty), near, weights, norms_of, i, i - 16, False, C, NORM, PRECISION)
        store_rows(Kd + (i - 16) * KP, [x * tl.exp2(gates[0] + fallen) for x in early], c, KP)
        store_rows(Kd + i * KP, latest, c, KP)
    return latest, G + fallen, since + fallen, fallen


@triton.jit(do_not_specialize=["N", "T", "beta_batch", "H", "HV"], do_not_specialize_on_alignment=PER_TOKEN)
def channel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, Qg, Kg, Kd, P, L, gamma, rates, vectors, norms, b_gate, v, w,
    W, N, T, scale, bound, beta_top, q_strides, k_strides, g_strides, b_strides, v_strides, w_strides, beta_batch,
    beta_token, beta_head, H, HV, GROUP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    NORM: tl.constexpr, SHORT: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, hv = tl.program_id(0) // HV, tl.program_id(0) % HV  # neighbours in memory are read at the same time
    h = hv // GROUP
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED, SHORT)
    if (token >= stop) | (n >= N):
        return
    head = slot.to(tl.int64) * HV + hv
    b = cumulate(
        g, beta, A_log, dt_bias, vectors + head * 4 * C, row, hv, token, stop, beta_top, (0, 0, 0),
        (beta_batch, beta_token, beta_head), C, False, False, False, HAS_BETA, RAW_BETA,
    )  # fmt: skip
    ty: tl.constexpr = k.dtype.element_ty
    i, c = tl.arange(0, C), tl.arange(0, BK)
    q_rows, k_rows = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
    g_rows, b_rows = rows_of(g, g_strides, row, hv), None
    if b_gate is not None:
        b_rows = rows_of(b_gate, b_strides, row, hv)
    if W is not None:
        write_values(v, w, W, v_strides, w_strides, token, tl.minimum(stop, token + C), row, hv, T, HV, V, C, RAW_BETA)
    rates += head * 4 * C
    tl.store(rates + 2 * C + i, b)
    if NORM:
        norms += (slot.to(tl.int64) * H + h) * 3 * C
    KP: tl.constexpr = pitch(K)
    P, L, tile = P + head * C * C, L + head * C * C, head * C * KP
    tl.store(P + i[:, None] * C + i[None, :], tl.zeros([C, C], ty), mask=i[:, None] // 16 < i[None, :] // 16)
    rate, bias = channel_parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    # Zeros. The load reads nothing, but decides which thread owns which channels. Without it, every vector would be
    # moved.
    zeros = tl.load(gamma + head * K + c, mask=c < tl.minimum(token, 0), other=0.0)
    G, since, lowest = zeros, zeros, zeros
    stop = tl.minimum(stop, token + C)
    early = (zeros,) * 16
    # Tiles are loaded some blocks ahead, by cp.async if the chip has it. The loop is not unrolled, because long code
    # does not fit the cache for instructions, and Triton's passes are slow on it.
    for I in range(C // 16):
        at = token + 16 * I
        q_tile = load_tile(q_rows, q_strides, at, stop, 0, K, 16, BK)
        k_tile = load_tile(k_rows, k_strides, at, stop, 0, K, 16, BK)
        g_tile = load_tile(g_rows, g_strides, at, stop, 0, K, 16, BK)
        b_tile = None
        if b_gate is not None:
            b_tile = load_tile(b_rows, b_strides, at, stop, 0, K, 16, BK)
        early, G, since, fell = token_block(
            q_tile, k_tile, b_tile, g_tile, Qg + tile, Kg + tile, Kd + tile, P, L, rates, norms, zeros, G, since,
            early, I, stop - at, c, rate, bias, scale, bound, beta_top, K, BK, C, RAW_GATE, BOUNDED, RAW_BETA, NORM,
            PRECISION,
        )  # fmt: skip
        lowest = tl.minimum(lowest, fell)
    tl.store(gamma + head * K + c, tl.exp2(G), mask=c < K)
    # So far Kd of the first half is decayed only up to the end of that half.
    HALF: tl.constexpr = C // 2
    early, j = load_block(Kd + tile, 0, 0, C, KP, HALF, BK), tl.arange(0, HALF)[:, None]
    early = (early * tl.exp2(since)[None, :]).to(ty)
    tl.store(Kd + tile + j * KP + c[None, :], early, mask=(c < KP)[None, :])
    if not BOUNDED and tl.min(tl.where(c < K, lowest, 0.0), 0) < LOOK:
        tl.debug_barrier()  # other threads write some of the rows above again
        explicit_scores(
            q_rows, k_rows, b_rows, g_rows, A_log, dt_bias, P, L, norms, hv, token, stop, scale, bound, beta_top,
            q_strides, k_strides, b_strides, g_strides, K, min(BK, 32), C, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS, RAW_BETA,
            NORM,
        )  # fmt: skip


def run_channel(c: Draft, s: Solved, ch: Channels, *, valued: bool = True) -> Draft:
    """Launches the kernel. It also writes the strengths and norms in ``s``, which otherwise `solve` writes. Returns the
    draft for the scans, whose values are W if the launch is ``valued`` and there is a strength per channel."""
    p, x = c.p, c.x
    written = values_of(c.made, p) if valued and p.channel_strength else None
    gates = x.b, *((None, None) if written is None else (x.v, x.w))
    pointers = (x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, *ch, s.vectors, s.norms, *gates, written)
    launch_rule(
        c, channel, pointers, (count_slots(p) * p.HV, 1, 1), tile("channel", p, c.chip),
        p.N, p.T, p.scale, p.gate.bound or 0.0, p.beta_range, strides(x.q), strides(x.k), strides(x.g),
        *map(strides_if, gates), batch(x.beta), *tokens(x.beta),
    )  # fmt: skip
    return c if written is None else c._replace(x=x._replace(v=written, w=None))
