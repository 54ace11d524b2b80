"""Gradients of queries, keys and gates with a gate per key channel, for all chunks at once, in bfloat16.

    dq = scale e^G . (dO S0^T) + sum over j <= i of dP_ij e^{G_i - G_j} . k_j
    dp = -e^G . (dV S0^T) + sum over j < i of dL_ij e^{G_i - G_j} . k_j
    dk = e^{G_C - G} . (U dS1^T) + sum over i >= j of e^{G_i - G_j} . (dP_ij q_i + dL_ij k_i)      (and dp, as p is k)
    dg_t = sum over i >= t of (q_i dq_i + k_i dp_i - k_i dk_i) + gamma S0 . dS1 + all that keys write after the chunk

With a strength per channel p = b . k of a value head: rows have p in place of k, dk gets b . dp, and db = k . dp.

`pairs` has written dPD and taken, which are the gradients of q_i . k_j and of p_i . k_j (with opposite sign), including
norms. It has also written the products with states. So q and k are multiplied as they are in memory. With a norm
y = r x, the accumulated gradient is z = r dy (see gradients.py).

Tokens come in blocks of 16. A tile is [W, 16]: W channels of one block, each a row of the accumulators. So decayed
copies are operands of the next product from registers. The other operands are the same for all channels and are in
shared memory. As in `channel`, the decay of a pair is split at G of the first token of the row's block,
``(q_i e^{G_i - r}) (k_j e^{r - G_j})``. If no log decay is above 0, no factor is above 1, except within a block, where
the second factor may be as large as the inverse of a channel's decay in the block.

A pair contributes to the gates between its tokens. This contribution is the difference of two sums, which begin at the
two tokens. Both multiply the same three rounded numbers. So for other gates the difference is 0 up to float32's
rounding, which is good enough for bfloat16. `halved_gradients` computes channels that decay by more than ``MILD``
within a block, which it reads from ``fallen``, and all other types.

Grid (slots K / W, HV). dq and dk are of one value head: `key_head_gradients` sums and finishes them.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_backward, strength_of
from flash_delta.kernels.device.chunk import count_slots, enter_chunk, load_block, rows_of, steps, store_tile
from flash_delta.kernels.device.gates import (
    BITS,
    LEAST_DECAY,
    channel_gate_backward,
    channel_log_decay,
    channel_parameters,
    clamp_backward,
    living,
    store_sums,
)
from flash_delta.kernels.runtime.arguments import block, launch_rule, strides_if
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import HeadGradients, Scores
from flash_delta.kernels.triton.backward.halved_gradients import MILD, in_parts, leading, sum_of
from flash_delta.kernels.triton.tiles import tile
from flash_delta.problem import Inputs


@triton.jit
def load_channels(x, strides, token, left, c, K: tl.constexpr, W: tl.constexpr):
    """``[W, 16]``: channels c of the first ``left`` of 16 tokens, 0 for the others."""
    t = tl.arange(0, 16)
    at = x + steps(token.to(tl.int64), strides, 1) + steps(t, strides, 1)[None, :] + c[:, None] * strides[3]
    some = (t[None, :] < left) & (c[:, None] >= 0)
    if K % W > 0:
        some &= c[:, None] < K
    return tl.load(at, mask=some, other=0.0)


@triton.jit
def in_order(x):
    """x in float32, in the layout of products. The product with the unit matrix is exact."""
    if x.dtype == tl.float32:
        return x
    else:
        o = tl.arange(0, 16)
        return tl.dot(x, (o[:, None] == o[None, :]).to(x.dtype))


@triton.jit
def chosen(x, I):
    """Element I of a tuple of tiles, or 0 after the last element."""
    y = x[0] * 0.0
    for m in tl.static_range(len(x)):
        y = tl.where(m == I, x[m], y)
    return y


@triton.jit
def last_of(s, RAW_GATE: tl.constexpr):
    """The last column of sums of gates ``[W, 16]``. Those of a raw gate only fall, so there it is the least one."""
    if RAW_GATE:
        return tl.min(s, 1)
    else:
        return tl.sum(tl.where(tl.arange(0, 16)[None, :] == 15, s, 0.0), 1)


@triton.jit
def total(x, first: tl.constexpr, I):
    """The sum of the elements ``first`` to I - 1 of a tuple of vectors."""
    y = x[0] * 0.0
    for m in tl.static_range(first, len(x)):
        y += tl.where(m < I, x[m], 0.0)
    return y


@triton.jit
def gates_of(tile, left, rate, bias, bound, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """Returns the activations of 16 tokens, of which ``left`` exist, their log decay in bits, and which tokens
    exist."""
    if BOUNDED and not RAW_GATE:  # -inf times the unit matrix's zeros is NaN; LEAST_DECAY is below any bound
        tile = tl.maximum(tile, LEAST_DECAY)
    a, live = in_order(tile), (tl.arange(0, 16) < left)[None, :]
    decay = channel_log_decay(
        living(a, live, RAW_GATE).to(tile.dtype), rate[:, None], bias[:, None], bound, BITS, RAW_GATE, BOUNDED
    )  # fmt: skip
    return a, decay, live


@triton.jit
def blocks_of(x, strides, token, stop, c, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """All blocks of a chunk, each [W, 16]."""
    tiles = ()
    for I in tl.static_range(C // 16):
        tiles += (load_channels(x, strides, token + 16 * I, stop - token - 16 * I, c, K, W),)
    return tiles


@triton.jit
def scores_of(x, I, J: tl.constexpr, C: tl.constexpr):
    """The scores of rows of block I with columns of an earlier block J, or 0 if J is not earlier."""
    r, c = tl.arange(0, 16)[:, None], 16 * J + tl.arange(0, 16)[None, :]
    return tl.load(x + (16 * I + r) * C + c, mask=(c < 16 * I) & (r >= 0), other=0.0)


@triton.jit
def store_rows(out, x, first, count, stride, K: tl.constexpr, W: tl.constexpr):
    """Stores ``[W, 16]`` as channels from ``first`` on of the first ``count`` tokens."""
    r, c = tl.arange(0, 16)[:, None], first + tl.arange(0, W)[None, :]
    some = r < count
    if K % W > 0:
        some &= c < K
    tl.store(out + r * stride + c, tl.trans(x.to(out.dtype.element_ty)), mask=some)


@triton.jit
def rounded(x):
    """x as bfloat16 rounds it, still in float32. A conversion there and back is slow: it takes one number at a time,
    not two."""
    return leading((x.to(tl.int32, bitcast=True) + 32768).to(tl.float32, bitcast=True))


@triton.jit
def between(aq, ap, z, y, qe, pe, columns, factor, dP, dL):
    """Adds the products between rows of a block and columns of the same or an earlier block.

    aq, ap: the rows' gradients before the rows' own decay, with dp's sign turned.
    z, y: the columns' gradients, and what the columns subtract from the gates' gradients.
    """
    columns = rounded(columns)
    ke = columns.to(dP.dtype)
    aq, ap = tl.dot(ke, tl.trans(dP), aq), tl.dot(ke, tl.trans(dL), ap)
    back = tl.dot(pe, dL, tl.dot(qe, dP))
    return aq, ap, z + factor * back, y - columns * back


@triton.jit(do_not_specialize=["N", "T", "HV"])
def channel_gradients(
    q, k, g, b_gate, A_log, dt_bias, dPD, taken, cu_seqlens, dq, dk, written, through, fallen, db, dg, dA_log, ddt_bias,
    N, T, bound, beta_top, q_strides, k_strides, g_strides, b_strides,
    HV, GROUP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr,
    STRENGTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Stores dg of W channels of one chunk and value head, and the chunk's gradients of A_log and dt_bias,
    ``[slots, HV, K]``. It reads the products with states from dq and dk ``[slots, HV, C, K]``, and stores there all of
    dq and dk of this value head (with a norm, r dy)."""
    BLOCKS: tl.constexpr = (K + W - 1) // W  # blocks of channels
    slot, hv, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP, BLOCKS)
    first = tl.program_id(0) % BLOCKS * W
    c, t = first + tl.arange(0, W), tl.arange(0, 16)
    ty: tl.constexpr = k.dtype.element_ty
    head, h = slot.to(tl.int64) * HV + hv, hv // GROUP
    strides, rows = (T.to(tl.int64) * HV * K, HV * K, K, 1), (0, K, 0, 1)
    dg, sums = rows_of(dg, strides, row, hv), head * K + c
    if STRENGTH:
        db, b_gate = rows_of(db, strides, row, hv), rows_of(b_gate, b_strides, row, hv)
    if empty:
        if STRENGTH:
            store_tile(db, strides, tl.zeros([C, W], db.dtype.element_ty), token, stop, first, K, C, W)
        store_tile(dg, strides, tl.zeros([C, W], tl.float32), token, stop, first, K, C, W)
        tl.store(fallen + sums, 0.0, mask=c < K)
        store_sums(dA_log, ddt_bias, sums, 0.0, 0.0, c < K, HAS_A, HAS_BIAS)
        return
    q, k, g = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h), rows_of(g, g_strides, row, hv)
    dPD, taken = dPD + head * C * C, taken + head * C * C
    dq, dk, written = dq + head * C * K, dk + head * C * K, written + head * C * K
    rate, bias = channel_parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    stop = tl.minimum(stop, token + C)
    LAST: tl.constexpr = C // 16 - 1
    # From right to left. rest: what keys write after the chunk. D: the sum of the gates from a block on. For every
    # block except the last one: its keys, decayed up to its end, and totals, its sum of gates. The compiler moves no
    # load over a barrier, and products have many barriers. So everything from memory is loaded at once.
    k_tiles = blocks_of(k, k_strides, token, stop, c, K, W, C)
    g_tiles = blocks_of(g, g_strides, token, stop, c, K, W, C)
    written_tiles = blocks_of(written, rows, token * 0, C, c, K, W, C)
    zero, none = tl.zeros([W, 16], tl.float32), tl.zeros([W], tl.float32)
    rest, D, lowest, keys, totals, z, y = none, none, none, (), (), (), ()
    behind_first = (t[:, None] > 0) & (t[:, None] <= t[None, :])
    for m in tl.static_range(LAST, -1, -1):
        _, gates, _ = gates_of(g_tiles[m], stop - token - 16 * m, rate, bias, bound, RAW_GATE, BOUNDED)
        kk = in_order(k_tiles[m])
        s = sum_of(in_parts(gates, 2), behind_first, zero, 2)
        fell = tl.sum(gates, 1)
        kk *= tl.exp2(last_of(s, RAW_GATE)[:, None] - s)
        rest += tl.sum(kk * in_order(written_tiles[m]), 1) * tl.exp2(D)
        lowest = tl.minimum(lowest, tl.min(s, 1))
        if m < LAST:
            keys, totals = (kk,) + keys, (fell,) + totals  # noqa: RUF005 (Triton has no star)
            z += (zero,)
            y += (zero,)
        D += fell
    tl.store(fallen + sums, lowest, mask=c < K)
    rest += tl.exp2(D) * tl.load(through + sums, mask=c < K, other=0.0)
    dA, dbias, D = none, none, none
    # Block by block, right to left. z and y keep what later rows add to a block's columns. The loop is not unrolled, so
    # that tiles are loaded some blocks ahead. Scores with blocks that are not earlier are 0.
    for back in range(C // 16):
        I = LAST - back
        at = token + 16 * I
        left = stop - at
        q_tile, k_tile = load_channels(q, q_strides, at, left, c, K, W), load_channels(k, k_strides, at, left, c, K, W)
        g_tile, end = load_channels(g, g_strides, at, left, c, K, W), load_channels(written, rows, 16 * I, 16, c, K, W)
        if STRENGTH:
            b_tile = load_channels(b_gate, b_strides, at, left, c, K, W)
        dq_tile, dk_tile = load_channels(dq, rows, 16 * I, 16, c, K, W), load_channels(dk, rows, 16 * I, 16, c, K, W)
        a, gates, live = gates_of(g_tile, left, rate, bias, bound, RAW_GATE, BOUNDED)
        s = sum_of(in_parts(gates, 2), behind_first, zero, 2)
        opens, fall = tl.sum(tl.where(t[None, :] == 0, gates, 0.0), 1), last_of(s, RAW_GATE)
        e, kk = tl.exp2(s), in_order(k_tile)
        pp = kk
        if STRENGTH:
            b = strength_of(in_order(b_tile), beta_top, RAW_BETA)
            pp = kk * b
        q_rows, p_rows = rounded(in_order(q_tile) * e), rounded(pp * (e * -1.0))
        qe, pe = q_rows.to(ty), p_rows.to(ty)
        start = tl.exp2(total(totals, 0, I) + opens)[:, None]
        aq, ap = in_order(dq_tile) * start, in_order(dk_tile) * start
        later_z, later_y = (), ()
        for J in tl.static_range(LAST):
            reach = tl.exp2(total(totals, J + 1, I) + opens)[:, None]
            aq, ap, zj, yj = between(
                aq, ap, z[J], y[J], qe, pe, keys[J] * reach, reach, scores_of(dPD, I, J, C), scores_of(taken, I, J, C)
            )  # fmt: skip
            later_z += (zj,)
            later_y += (yj,)
        z, y = later_z, later_y
        grown = s * -1.0
        if not BOUNDED:
            grown = tl.minimum(grown, MILD + 1.0)  # larger ones are computed again
        grown = tl.exp2(grown)
        dP, dL = load_block(dPD, 16 * I, 16 * I, C, C, 16, 16), load_block(taken, 16 * I, 16 * I, C, C, 16, 16)
        aq, ap, zz, yy = between(aq, ap, zero, chosen(y, I), qe, pe, kk * grown, grown, dP, dL)
        late, end = tl.exp2(fall)[:, None] * grown, in_order(end) * tl.exp2(D)[:, None]
        D += opens + fall
        store_rows(dq + 16 * I * K, e * aq, first, 16, K, K, W)
        if STRENGTH:
            ep = e * ap
            d = strength_backward(kk * (ep * -1.0), b, beta_top, RAW_BETA)
            store_rows(db + at.to(tl.int64) * (HV * K), d, first, left, HV * K, K, W)
            store_rows(dk + 16 * I * K, zz + late * (end + chosen(z, I)) - ep * b, first, 16, K, K, W)
        else:
            store_rows(dk + 16 * I * K, zz + late * (end + chosen(z, I)) - e * ap, first, 16, K, K, W)
        yy += q_rows * aq + p_rows * ap - kk * late * end
        d = sum_of(in_parts(yy, 3), t[:, None] >= t[None, :], zero, 3) + rest[:, None]
        rest += tl.sum(yy, 1)
        if RAW_GATE:
            d, of_A_log = channel_gate_backward(d, gates * (1.0 / BITS), a, rate[:, None], bias[:, None], live, BOUNDED)
            dA += tl.sum(of_A_log, 1)
            dbias += tl.sum(d, 1)
        elif BOUNDED:
            d = clamp_backward(d, a, bound)
        store_rows(dg + at.to(tl.int64) * (HV * K), d, first, left, HV * K, K, W)
    store_sums(dA_log, ddt_bias, sums, dA, dbias, c < K, HAS_A, HAS_BIAS)


def run_channel_gradients(
    c: Draft, scores: Scores, heads: HeadGradients, d: Inputs, t: Tile | None = None
) -> None:  # fmt: skip
    """Computes dg, db, dq and dk of every value head, and the gradients of A_log and dt_bias of every chunk, [slots,
    HV,
    K], which the caller sums. For bfloat16."""
    p, x = c.p, c.x
    chosen = t or tile("channel_gradients", p, c.chip)
    W = min(chosen.BV, block(p.K))  # channels of one program
    pointers = (
        x.q, x.k, x.g, x.b, x.A_log, x.dt_bias, scores.queries, scores.keys, x.cu_seqlens, *heads, d.b, d.g, d.A_log,
        d.dt_bias,
    )  # fmt: skip
    top = p.beta_range if p.channel_strength else None
    scalars = p.N, p.T, p.gate.bound or 0.0, top, *map(strides_if, (x.q, x.k, x.g, x.b))
    grid = (count_slots(p) * -(-p.K // W), p.HV, 1)
    launch_rule(c, channel_gradients, pointers, grid, chosen, *scalars, W=W, follows=True)
