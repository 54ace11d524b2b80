"""Stages ``cumulate`` and ``solve``: gate sums and the inverse of a chunk, for all value heads of a key head.

    G_i = g_1 + .. + g_i                g: the log decay, given or computed from its raw activation
    L_ij = p_i . k_j e^{H_i - G_j}      i > j;  H = G, or G_{i-1} where the erase reads the undecayed state
    A = (I + diag(b) L)^{-1}

With a decay per channel A is stored without its diagonal, which is 1 (hopper/channel/prepare.py has why).

One warp computes A in blocks of 16 x 16, by doubling. Let M = -diag(b) L, and let A be the inverses of the diagonal
blocks of s tokens. Then the inverses of blocks of 2 s tokens are ``A + A M A``, where M has only the part between the
two halves. So no intermediate number is larger than those of the inverse, for any keys. Small matrices come with their
transposes, because the registers of a product's result B^T are those of the operand B of the next product. M contains
decays only from later to earlier tokens. None is above 1 if no log decay is above 0.

G is summed in float64 and kept as two float32, so that differences are right even if G is large. Writes

    A        [slots, HV, C, C]   float16 if inputs have 16 bits (products.py); larger numbers are clamped
    vectors  [slots, HV, 4, C]   G, its rest beyond float32 (both with a gate), b, the log decay (if g was raw)
    norms    [slots, H, 3, C]    with norms: the reciprocal lengths of q, k and p

Grid (slots, H), one warp. With a decay per channel (CHANNEL), `channel` has written L, b and norms, and only A is
computed here.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength
from flash_delta.kernels.device.chunk import (
    count_slots,
    find_chunk,
    follow,
    lead,
    load_block,
    load_row,
    load_tile,
    reciprocal_lengths,
    rows_of,
)
from flash_delta.kernels.device.gates import head_log_decay, head_parameters
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, strides, tokens
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import Channels, Solved
from flash_delta.kernels.triton.tiles import WARP

LEAST_HEAD_DECAY = tl.constexpr(-1024.0)  # e^-1024 is 0, and a gate of -inf becomes a finite number
MOST = tl.constexpr(40.0)  # the largest exponent of a pair. Pairs above the diagonal are left out, but may not overflow


@triton.jit
def product(a, bt, c, PRODUCTS: tl.constexpr):
    """``c + a b`` of [16, 16], with b given as its transpose, in float16 or in float32 with an input precision.
    "clamped" is float16, in which larger results become the largest float16. So no later product makes a NaN of them.

    b is transposed in float32, which needs no exchange of registers. Triton would move 16-bit numbers through shared
    memory.
    """
    b = tl.trans(bt)
    if PRODUCTS == "float16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), c)
    elif PRODUCTS == "clamped":
        return tl.clamp(tl.dot(a.to(tl.float16), b.to(tl.float16), c), -65504.0, 65504.0)
    else:
        return tl.dot(a, b, c, input_precision=PRODUCTS)


@triton.jit
def pairs_of_tokens(M, PRODUCTS: tl.constexpr):
    """The inverses of blocks of 2 tokens, [16, 16], and their transposes."""
    o = tl.arange(0, 16)
    r, c = o[:, None], o[None, :]
    eye = tl.where(r == c, 1.0, 0.0)
    A = tl.where((r ^ c) == 1, M, eye)
    return A, product(eye, A, tl.zeros([16, 16], tl.float32), PRODUCTS)


@triton.jit
def doubled(A, At, M, level, PRODUCTS: tl.constexpr):
    """The inverses of blocks of twice as many tokens, and their transposes, from those of blocks of ``2^level``
    tokens."""
    half = tl.arange(0, 16) >> level
    below = tl.where((half[:, None] ^ half[None, :]) == 1, M, 0.0)
    step = product(At, below, tl.zeros([16, 16], tl.float32), PRODUCTS)  # (below A)^T
    return product(A, step, A, PRODUCTS), product(step, A, At, PRODUCTS)


@triton.jit
def inverses(M0, M1, PRODUCTS: tl.constexpr):
    """``(I - M)^{-1}`` and its transpose for two matrices M [16, 16]."""
    A0, T0 = pairs_of_tokens(M0, PRODUCTS)
    A1, T1 = pairs_of_tokens(M1, PRODUCTS)
    if PRODUCTS == "float16" or PRODUCTS == "clamped":
        for level in tl.static_range(1, 4):
            A0, T0 = doubled(A0, T0, M0, level, PRODUCTS)
            A1, T1 = doubled(A1, T1, M1, level, PRODUCTS)
    else:  # in float32 registers suffice for one at a time
        for level in range(1, 4):
            A0, T0 = doubled(A0, T0, M0, level, PRODUCTS)
        for level in range(1, 4):
            A1, T1 = doubled(A1, T1, M1, level, PRODUCTS)
    return A0, T0, A1, T1


@triton.jit
def cumulate(
    g, beta, A_log, dt_bias, vectors, row, hv, token, stop, beta_top, g_strides, beta_strides,
    C: tl.constexpr, GATE: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr,
    RAW_BETA: tl.constexpr, STEPS: tl.constexpr = 1,
):  # fmt: skip
    """Writes the vectors of one value head, to which ``vectors`` points. Returns b."""
    i = tl.arange(0, C)
    live = token + i < stop
    if GATE:
        x = load_row(rows_of(g, g_strides, row, hv), g_strides, token, stop, C, STEPS)
        if RAW_GATE:
            rate, bias = head_parameters(A_log, dt_bias, hv, HAS_BIAS)
            decaying = live if STEPS == 1 else live & (i % STEPS == 0)
            x = tl.where(decaying, head_log_decay(x, rate, bias), 0.0)
            tl.store(vectors + 3 * C + i, x)
        G = tl.cumsum(tl.maximum(x, LEAST_HEAD_DECAY).to(tl.float64), 0)
        high = G.to(tl.float32)
        tl.store(vectors + i, high)
        tl.store(vectors + C + i, (G - high.to(tl.float64)).to(tl.float32))
    b = tl.where(live, 1.0, 0.0)
    if HAS_BETA:
        b = load_row(rows_of(beta, beta_strides, row, hv), beta_strides, token, stop, C)
        if RAW_BETA:
            b = tl.where(live, strength(b, beta_top), 0.0)
    tl.store(vectors + 2 * C + i, b)
    return b


@triton.jit
def block_gates(scores, vectors, m: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, UNDECAYED: tl.constexpr):
    """M of the tokens 16 m to 16 m + 15, [16, 16], and the factors of the blocks beside it and below it:

        row_i    = -b_i e^{H_i - G_before}    [16, 1]
        column_j = e^{G_last - G_j}           [1, 16]
        span     = e^{G_last - G_before}

    "before" and "last" are the last tokens of the block before and of this block.
    """
    o = tl.arange(0, 16)
    at = vectors + 16 * m
    row, column, span = -tl.load(at + 2 * C + o), tl.full([16], 1.0, tl.float32), 1.0
    M = tl.where(o[:, None] > o[None, :], scores * row[:, None], 0.0)
    if GATE:
        high, low = tl.load(at + o), tl.load(at + C + o)
        high_p, low_p = high, low
        if UNDECAYED:
            high_p = tl.load(at - 1 + o, mask=16 * m + o > 0, other=0.0)
            low_p = tl.load(at + C - 1 + o, mask=16 * m + o > 0, other=0.0)
        M *= tl.exp(tl.minimum((high_p[:, None] - high[None, :]) + (low_p[:, None] - low[None, :]), MOST))
        last_high, last_low = tl.load(at + 15), tl.load(at + C + 15)
        column = tl.exp((last_high - high) + (last_low - low))
        if m > 0:
            before_high, before_low = tl.load(at - 1), tl.load(at + C - 1)
            row *= tl.exp((high_p - before_high) + (low_p - before_low))
            span = tl.exp((last_high - before_high) + (last_low - before_low))
    return M, row[:, None], column[None, :], span


@triton.jit
def store_block(A, block, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr, CHANNEL: tl.constexpr):
    o = tl.arange(0, 16)
    if CHANNEL and i == j:
        block = tl.where(o[:, None] == o[None, :], 0.0, block)
    if A.dtype.element_ty == tl.float16:
        block = tl.clamp(block, -65504.0, 65504.0)
    tl.store(A + 16 * (i * C + j) + o[:, None] * C + o[None, :], block.to(A.dtype.element_ty))


@triton.jit
def load_scores(L, C: tl.constexpr):
    """Loads the blocks of ``score_blocks``, which `channel` has written."""
    scores = ()
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1):
            scores += (load_block(L, 16 * i, 16 * j, C, C, 16, 16).to(tl.float32),)
    return scores


@triton.jit
def load_rows(x, strides, token, stop, column, K: tl.constexpr, W: tl.constexpr):
    """A chunk's rows as four tiles [16, W]."""
    tiles = ()
    for i in tl.static_range(4):
        tiles += (load_tile(x, strides, token + 16 * i, stop, column, K, 16, W),)
    return tiles


@triton.jit
def score_blocks(
    k, p, norms, token, stop, k_strides, p_strides, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr, OWN_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The ten blocks of p k^T on and below the diagonal, row by row."""
    scores = (tl.zeros([16, 16], tl.float32),) * 10
    for column in range(0, K, W):
        kk = load_rows(k, k_strides, token, stop, column, K, W)
        pp = load_rows(p, p_strides, token, stop, column, K, W) if OWN_P else kk
        columns, sums = [tl.trans(tile) for tile in kk], ()
        for i in tl.static_range(4):
            for j in tl.static_range(i + 1):
                sums += (tl.dot(pp[i], columns[j], scores[len(sums)], input_precision=PRECISION),)
        scores = sums
    if NORM:
        at, of_p, of_k = norms + C + tl.arange(0, 16), (), ()
        for i in tl.static_range(4):
            of_k += (tl.load(at + 16 * i)[None, :],)
            of_p += (tl.load(at + C + 16 * i)[:, None],)
        normed = ()
        for i in tl.static_range(4):
            for j in tl.static_range(i + 1):
                normed += (scores[len(normed)] * of_p[i] * of_k[j],)
        scores = normed
    return scores


@triton.jit(do_not_specialize=["N", "T", "g_batch", "beta_batch", "H", "HV"], do_not_specialize_on_alignment=PER_TOKEN)
def solve(
    q, k, p, g, beta, A_log, dt_bias, cu_seqlens, L, A, vectors, norms, N, T, beta_top,
    q_strides, k_strides, p_strides, g_batch, g_token, g_head, beta_batch, beta_token, beta_head,
    H, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    GATE: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    NORM: tl.constexpr, UNDECAYED: tl.constexpr, ERASE: tl.constexpr, OWN_P: tl.constexpr, CHANNEL: tl.constexpr,
    STRENGTH: tl.constexpr, STEPS: tl.constexpr, SHORT: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, h = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED, SHORT)
    if (token >= stop) | (n >= N):
        follow(OVERLAP and SHORT > 0 and CHANNEL)
        return
    if CHANNEL:
        follow(OVERLAP)  # without CHANNEL it is the first kernel of its call
    else:
        W: tl.constexpr = min(BK, 512 // k.dtype.element_ty.primitive_bitwidth)  # wider ones take too many registers
        for member in range(GROUP):
            hv = h * GROUP + member
            cumulate(
                g, beta, A_log, dt_bias, vectors + (slot.to(tl.int64) * HV + hv) * 4 * C, row, hv, token, stop,
                beta_top, (g_batch, g_token, g_head), (beta_batch, beta_token, beta_head),
                C, GATE, RAW_GATE, HAS_BIAS, HAS_BETA, RAW_BETA, STEPS,
            )  # fmt: skip
        k_rows, p_rows = rows_of(k, k_strides, row, h), rows_of(p, p_strides, row, h)
        if NORM:
            norms += (slot.to(tl.int64) * H + h) * 3 * C
            i = tl.arange(0, C)
            q_rows = rows_of(q, q_strides, row, h)
            tl.store(norms + i, reciprocal_lengths(q_rows, q_strides, token, stop, K, C, W, STEPS))
            lengths = reciprocal_lengths(k_rows, k_strides, token, stop, K, C, W)
            tl.store(norms + C + i, lengths)
            if OWN_P:
                lengths = reciprocal_lengths(p_rows, p_strides, token, stop, K, C, W)
            tl.store(norms + 2 * C + i, lengths)
    if ERASE:
        if not CHANNEL:
            tl.debug_barrier()  # other threads read below what was written above
            s00, s10, s11, s20, s21, s22, s30, s31, s32, s33 = score_blocks(
                k_rows, p_rows, norms, token, stop, k_strides, p_strides, K, C, W, NORM, OWN_P, PRECISION
            )
        # float16 is as accurate as tf32. With 0.9-correlated keys and b up to 2, A is off by 3e-3, and in bfloat16 by
        # 2.5e-2. Keys without norms may have any length, so A may be beyond float16. So may it be with a
        # strength per channel, since a token may then stretch the state.
        BOUNDED_A: tl.constexpr = NORM and not STRENGTH
        HALF: tl.constexpr = "float16" if BOUNDED_A else "clamped"
        PRODUCTS: tl.constexpr = PRECISION if k.dtype.element_ty == tl.float32 else HALF
        zero = tl.zeros([16, 16], tl.float32)
        for member in range(GROUP):
            head = slot.to(tl.int64) * HV + h * GROUP + member
            v, a = vectors + head * 4 * C, A + head * C * C
            if CHANNEL:
                s00, s10, s11, s20, s21, s22, s30, s31, s32, s33 = load_scores(L + head * C * C, C)
            r, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
            tl.store(a + r * C + c, tl.zeros([C, C], A.dtype.element_ty), mask=r // 16 < c // 16)
            # tokens 0 to 31
            M00, _, c0, _ = block_gates(s00, v, 0, C, GATE, UNDECAYED)
            M11, r1, c1, span1 = block_gates(s11, v, 1, C, GATE, UNDECAYED)
            A00, T00, A11, T11 = inverses(M00, M11, PRODUCTS)
            step = product(T00, s10 * r1 * c0, zero, PRODUCTS)
            A10, T10 = product(A11, step, zero, PRODUCTS), product(step, A11, zero, PRODUCTS)
            store_block(a, A00, 0, 0, C, CHANNEL)
            store_block(a, A10, 1, 0, C, CHANNEL)
            store_block(a, A11, 1, 1, C, CHANNEL)
            # tokens 32 to 63
            M22, r2, c2, span2 = block_gates(s22, v, 2, C, GATE, UNDECAYED)
            M33, r3, _, _ = block_gates(s33, v, 3, C, GATE, UNDECAYED)
            A22, T22, A33, _ = inverses(M22, M33, PRODUCTS)
            A32 = product(A33, product(T22, s32 * r3 * c2, zero, PRODUCTS), zero, PRODUCTS)
            store_block(a, A22, 2, 2, C, CHANNEL)
            store_block(a, A32, 3, 2, C, CHANNEL)
            store_block(a, A33, 3, 3, C, CHANNEL)
            # the block between the second and the first 32 tokens
            c0 *= span1
            M21 = s21 * r2 * c1
            W20 = product(T10, M21, product(T00, s20 * r2 * c0, zero, PRODUCTS), PRODUCTS)
            W21 = product(T11, M21, zero, PRODUCTS)
            store_block(a, product(A22, W20, zero, PRODUCTS), 2, 0, C, CHANNEL)
            store_block(a, product(A22, W21, zero, PRODUCTS), 2, 1, C, CHANNEL)
            c0, c1 = c0 * span2, c1 * span2
            M31 = s31 * r3 * c1
            W30 = product(T10, M31, product(T00, s30 * r3 * c0, zero, PRODUCTS), PRODUCTS)
            W31 = product(T11, M31, zero, PRODUCTS)
            store_block(a, product(A32, W20, product(A33, W30, zero, PRODUCTS), PRODUCTS), 3, 0, C, CHANNEL)
            store_block(a, product(A32, W21, product(A33, W31, zero, PRODUCTS), PRODUCTS), 3, 1, C, CHANNEL)


def run_solve(c: Draft, ch: Channels, s: Solved) -> None:
    p, x = c.p, c.x
    pointers = (x.q, x.k, c.keys, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, ch.L, *s)
    launch_rule(
        c, solve, pointers, (count_slots(p), p.H, 1), WARP,
        p.N, p.T, p.beta_range, strides(x.q), strides(x.k), strides(c.keys), batch(x.g), *tokens(x.g),
        batch(x.beta), *tokens(x.beta), follows=p.gate.kind == "channel",
    )  # fmt: skip
