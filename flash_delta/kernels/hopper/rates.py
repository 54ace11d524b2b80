"""Stage ``cumulate``: per chunk and value head, what the loop applies to scores and accumulators.

    G = log2 e (g_1 + .. + g_i)         the log decay g as given, or made of its raw activation
    rates [R, C] = G, b, e_p = r_k 2^G, e_q = scale r_q 2^G; with a norm also scale r_q and r_k

with the reciprocal lengths r of q and k (1 without a norm). G is summed in float64, of decays cut off at e^-128, which
is 0 in float32: so |G| stays below 2^14 and its differences resolve 2^-10 after 64 such tokens. Rows behind the end of
a sequence get b = 0 and no decay. What lies behind the last sequence of a packed row is written here, as zeros.
Grid (slots, HV / HEADS): HEADS value heads of a program, with a norm those of one key head.
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton.activation import softplus, strength
from flash_delta.kernels.triton.chunk import find_chunk, lead, rows_of, store_tile
from flash_delta.kernels.triton.solve import reciprocal_lengths

LEAST = tl.constexpr(-128.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["N", "T", "g_batch", "beta_batch"])
def rates(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, o, out, N, T, scale, beta_top, q_strides, k_strides,
    g_batch, g_strides, beta_batch, beta_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, RAW_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, first = tl.program_id(0), tl.program_id(1) * HEADS
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    if token >= stop:
        return
    if n >= N:
        strides = (T.to(tl.int64) * HV * V, HV * V, V, 1)
        for member in range(HEADS):
            rows = rows_of(o, strides, row, first + member)
            store_tile(rows, strides, tl.zeros([C, V], o.dtype.element_ty), token, stop, 0, V, C, V)
        return
    i, hv = tl.arange(0, C)[:, None], first + tl.arange(0, BH)[None, :]
    known = hv < first + HEADS
    live = (token + i < stop) & known
    G = tl.zeros([C, BH], tl.float32)
    if GATE:
        at = row.to(tl.int64) * g_batch + (token + i).to(tl.int64) * g_strides[0] + hv * g_strides[1]
        x = tl.load(g + at, mask=live, other=0.0).to(tl.float32)
        if RAW_GATE:
            if HAS_BIAS:
                x += tl.load(dt_bias + hv, mask=known, other=0.0).to(tl.float32)
            x = -tl.exp(tl.load(A_log + hv, mask=known, other=0.0).to(tl.float32)) * softplus(x)
            x = tl.where(live, x, 0.0)
        G = (tl.cumsum(tl.maximum(x, LEAST).to(tl.float64), 0) * LOG2_E).to(tl.float32)
    b = tl.where(live, 1.0, 0.0)
    if HAS_BETA:
        at = row.to(tl.int64) * beta_batch + (token + i).to(tl.int64) * beta_strides[0] + hv * beta_strides[1]
        b = tl.load(beta + at, mask=live, other=0.0).to(tl.float32)
        if RAW_BETA:
            b = tl.where(live, strength(b, beta_top), 0.0)
    to = out + (slot.to(tl.int64) * HV + hv) * (R * C) + i
    e_k = tl.exp2(tl.sum(tl.where(i == C - 1, G, 0.0), 0)[None, :] - G)
    if NORM:
        h = first // (HV // H)
        W: tl.constexpr = 32
        r_q = reciprocal_lengths(rows_of(q, q_strides, row, h), q_strides, token, stop, K, C, W)[:, None]
        r_k = reciprocal_lengths(rows_of(k, k_strides, row, h), k_strides, token, stop, K, C, W)[:, None]
        e_k *= r_k
        tl.store(to + 4 * C, r_k + tl.zeros([C, BH], tl.float32), mask=known)
        tl.store(to + 5 * C, scale * r_q + tl.zeros([C, BH], tl.float32), mask=known)
    tl.store(to, G, mask=known)
    tl.store(to + C, b, mask=known)
    tl.store(to + 2 * C, tl.exp2(G), mask=known)
    tl.store(to + 3 * C, e_k, mask=known)
