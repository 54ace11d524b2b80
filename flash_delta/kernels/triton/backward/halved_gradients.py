"""Computes the gradients of `channel_gradients` for any decay and any dtype. No sum cancels, and no factor is above 1
if no log decay is above 0.

A chunk is halved again and again, into parts of 32, 16, .. 1 tokens. The decay of a pair is split at the level where
its two tokens are in different parts: ``(q_i e^{G_i - r}) (k_j e^{r - G_j})`` with r = G of the last token of the
earlier part. Between the two halves of the chunk, these factors are the same as for reading the state before the chunk
and for writing the state after it, except for the decay of a whole half.

A tile is [W, 32]: W channels of half a chunk, each a row of the accumulators. So decayed copies are operands of the
next product from registers. The other operands are the same for all channels and are in shared memory. Exponents are
sums of only those gates that a factor contains, by products with ones. They do not depend on earlier gates. A gate's
gradient is summed only over factors that contain the gate. What rows add to dq and dp counts for gates up to their own
tokens. What columns add to dk counts for gates after their own tokens. Gates between the two parts get all of it.

In bfloat16 it computes only channels that decay by more than ``MILD`` within some block of 16 tokens (``fallen``). All
other programs end at once. The grid is (slots K / W, HV). dq and dk are like those of `channel_gradients`.
"""

import torch
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
    steps,
    store_tile,
    whole_rows,
)
from flash_delta.kernels.device.gates import (
    BITS,
    channel_gate_backward,
    channel_log_decay,
    channel_parameters,
    clamp_backward,
    living,
    store_sums,
)
from flash_delta.kernels.runtime.arguments import block, launch_rule, state_unit, strides_if
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import HeadGradients, Residual, Scores, Solved, StateGradients
from flash_delta.kernels.triton.tiles import tile
from flash_delta.problem import Inputs, Problem

MILD = tl.constexpr(110.0)  # bits, 76 nats: 2^110 times a key fits bfloat16; 15 tokens at the lower bound have 108


@triton.jit
def load_channels(x, strides, token, stop, c, K: tl.constexpr, W: tl.constexpr):
    """``[W, 32]``: channels c of 32 tokens. From ``stop`` on, the last token is repeated, and is only multiplied by 0.

    There is no mask, because loads and stores would share it, and it would take registers from the first to the last.
    """
    o = tl.minimum(tl.arange(0, 32), stop - 1 - token)
    at = steps(o, strides, 1)[None, :] + c[:, None] * strides[3]  # 32 bits, since 64 bits take more registers
    at += x + steps(token.to(tl.int64), strides, 1)
    if K % W == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(c < K)[:, None], other=0.0)


@triton.jit
def store_channels(out, x, stride, count, c, K: tl.constexpr, W: tl.constexpr):
    """Stores channels of the first ``count`` tokens."""
    o = tl.arange(0, 32)
    some = (o < count)[None, :]
    if K % W > 0:
        some &= (c < K)[:, None]
    tl.store(out + o[None, :] * stride + c[:, None], x.to(out.dtype.element_ty), mask=some)


@triton.jit
def load_gates(
    raw, strides, unit, hv, token, stop, c, K: tl.constexpr, W: tl.constexpr,
    RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Returns the activations of 32 tokens and their log decays, ``[W, 32]``; which tokens exist; and the results of
    ``parameters``. ``raw``: g, A_log, dt_bias and the lower bound. ``strides``: those of g."""
    g, A_log, dt_bias, bound = raw
    rate, bias = channel_parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    live = (token + tl.arange(0, 32) < stop)[None, :]
    a = load_channels(g, strides, token, stop, c, K, W)
    decays = channel_log_decay(
        living(a, live, RAW_GATE), rate[:, None], bias[:, None], bound, unit, RAW_GATE, BOUNDED
    )  # fmt: skip
    return a, decays, live, rate, bias


@triton.jit
def leading(x):
    """The bits of a float32 that bfloat16 has, by a mask. A conversion there and back is slow: it takes one number, not
    two, at a time."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """x split into parts of 8 bits. Their products with zeros and ones are exact."""
    parts = ()
    for _ in tl.static_range(PARTS - 1):
        part = leading(x)
        parts += (part.to(tl.bfloat16),)
        x -= part
    return parts + (x.to(tl.bfloat16),)  # noqa: RUF005 (Triton has no star)


@triton.jit
def sum_of(parts, carried, out, PARTS: tl.constexpr):
    """Adds to column t of ``out`` the columns of ``parts`` whose row of ``carried [32, 32]`` contains t."""
    ones = carried.to(tl.bfloat16)
    for m in tl.static_range(PARTS):
        out = tl.dot(parts[m], ones, out)
    return out


@triton.jit
def decay(gates, carried, PARTS: tl.constexpr):
    return tl.exp2(sum_of(gates, carried, tl.zeros(gates[0].shape, tl.float32), PARTS))


@triton.jit
def add_sums(dg, x, carried, PARTS: tl.constexpr):
    """Adds to every gate r those x whose column of ``carried`` contains r."""
    return sum_of(in_parts(x, PARTS), tl.trans(carried.to(tl.bfloat16)), dg, PARTS)


@triton.jit
def to_rows(aq, ap, ke, dP, dL, PRECISION: tl.constexpr):
    """Adds the products with the columns ``ke`` to the rows' gradients."""
    aq = tl.dot(ke, tl.trans(dP), aq, input_precision=PRECISION)
    return aq, tl.dot(ke, tl.trans(dL), ap, input_precision=PRECISION)


@triton.jit
def to_columns(back, qe, pe, dP, dL, PRECISION: tl.constexpr):
    """Adds the products with the rows to the columns' gradients."""
    back = tl.dot(qe, dP, back, input_precision=PRECISION)
    return tl.dot(pe, dL, back, input_precision=PRECISION)


@triton.jit
def halves(zq, zk, zp, dg, q, k, p, gates, dP, dL, half, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the products between every earlier part of ``half`` tokens and the later part after it. Without zp, p is k,
    and dp is added to zk."""
    r, t = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    middle = (t & -half) | half
    carried = ((middle < r) & (r <= t)) | ((t < r) & (r <= middle))  # by token t, gate r
    e = decay(gates, carried, PARTS)
    ke, qe = (k * e).to(k.dtype), (q * e).to(q.dtype)
    below = (((r ^ t) & -half) == half) & (r > t)
    dP, dL = tl.where(below, dP, 0.0), tl.where(below, dL, 0.0)
    zero = tl.zeros(zq.shape, tl.float32)
    if zp is not None:
        pe = (p * e).to(k.dtype)
        aq, ap = to_rows(zero, zero, ke, dP, dL, PRECISION)
        ak = to_columns(zero, qe, pe, dP, dL, PRECISION)
        sums = qe.to(tl.float32) * aq + pe.to(tl.float32) * ap + ke.to(tl.float32) * ak
        return zq + e * aq, zk + e * ak, zp + e * ap, add_sums(dg, sums, carried, 3)
    else:
        aq, ak = to_rows(zero, zero, ke, dP, dL, PRECISION)  # later keys erase,
        ak = to_columns(ak, qe, ke, dP, dL, PRECISION)  # earlier ones write
        dg = add_sums(dg, qe.to(tl.float32) * aq + ke.to(tl.float32) * ak, carried, 3)
        return zq + e * aq, zk + e * ak, dg


@triton.jit
def read_state(
    state, do, do_strides, dU, at, stop, I, column, reads, erases,
    K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of half I from reads and erases in the state before the chunk: products with dO and dU~,
    ``[W, 32]``."""
    x, y = tl.zeros([W, 32], tl.float32), tl.zeros([W, 32], tl.float32)
    for w in range(0, V, BV):
        s = tl.trans(load_block(state, w, column, V, pitch(K), BV, W))
        dO = load_tile(do, do_strides, at, stop, w, V, 32, BV)
        x = tl.dot(s, tl.trans(dO), x, input_precision=PRECISION)
        y = tl.dot(s, tl.trans(load_block(dU, 32 * I, w, C, pitch(V), 32, BV)), y, input_precision=PRECISION)
    return x * reads[None, :], y * erases[None, :]


@triton.jit
def write_state(
    dstate, U, I, column, writes,
    K: tl.constexpr, W: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of half I from writes to the state after the chunk: the product of its gradient with U, ``[W, 32]``."""
    x = tl.zeros([W, 32], tl.float32)
    for w in range(0, V, BV):
        d = tl.trans(load_block(dstate, w, column, V, pitch(K), BV, W))
        x = tl.dot(d, tl.trans(load_block(U, 32 * I, w, C, pitch(V), 32, BV)), x, input_precision=PRECISION)
    return x * writes[None, :]


@triton.jit
def state_sums(state, dstate, column, K: tl.constexpr, W: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """S0 . dS1 of every channel, [W]."""
    x = tl.zeros([W], tl.float32)
    for w in range(0, V, BV):
        s, d = load_block(state, w, column, V, pitch(K), BV, W), load_block(dstate, w, column, V, pitch(K), BV, W)
        x += tl.sum(s.to(tl.float32) * d.to(tl.float32), 0)
    return x


@triton.jit
def token_factors(norms, b, scale, unit, I, C: tl.constexpr, NORM: tl.constexpr):
    """The factors of half I of the chunk for reading, erasing and writing in the state."""
    i = 32 * I + tl.arange(0, 32)
    reads, erases, writes = tl.full([32], scale, tl.float32), -tl.load(b + i), tl.full([32], unit, tl.float32)
    if NORM:
        of_k = tl.load(norms + C + i)
        reads, erases, writes = reads * tl.load(norms + i), erases * of_k, writes * of_k
    return reads, erases, writes


@triton.jit
def load_scores(dPD, taken, I, J, C: tl.constexpr):
    """dP and dL between halves I and J."""
    return load_block(dPD, 32 * I, 32 * J, C, C, 32, 32), -load_block(taken, 32 * I, 32 * J, C, C, 32, 32)


@triton.jit
def half_chunk(
    q, k, gate, read, erased, dstate, U, g, norms, b, dPD, taken, ke, written, past, through, rest, scale, unit,
    beta_top, dq, dk, db, stride, count, column, I, K: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores dq and dk of half I of a chunk, and returns the gradients of its log decays, ``[W, 32]``. ``gate``: b with
    a strength per channel; then db is stored, too.

    ``read``, ``erased``: results of `read_state`. ``ke``: the earlier half's keys, decayed up to its end. ``written``:
    what its columns get from later tokens. ``past``: its decay. ``rest``: a term that contains all gates of this half.
    The later half runs first. It decays ``written`` and ``rest``, and adds what its rows give to columns of the earlier
    half and read in the state.
    """
    r, t = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    c = column + tl.arange(0, W)
    ty: tl.constexpr = k.dtype
    zero = tl.zeros(q.shape, tl.float32)
    gates = in_parts(g, PARTS)
    dP, dL = load_scores(dPD, taken, I, I, C)
    own = tl.load(dPD + (32 * I + tl.arange(0, 32)) * (C + 1)).to(tl.float32)[None, :]  # there is no gate in between
    e = decay(gates, r <= t, PARTS)
    p = k
    if gate is not None:
        p = k.to(tl.float32) * gate
    zq, zp = e * read, e * erased
    if I == 1:
        future = tl.exp2(tl.sum(g, 1))
        written, rest, through = written * future[:, None], rest * future, through * future
        zq, zp = zq * past[:, None], zp * past[:, None]
    here, back = rest, written
    dg = add_sums(zero, q * zq + p * zp, r <= t, PARTS)
    if I == 1:
        rest = through + tl.sum(tl.where(t == 0, dg, 0.0), 1)
        dP_next, dL_next = load_scores(dPD, taken, 1, 0, C)
        written = to_columns(written, (q * e).to(ty), (p * e).to(ty), dP_next, dL_next, PRECISION)
        aq, ap = to_rows(zero, zero, ke, dP_next, dL_next, PRECISION)
        aq, ap = e * aq, e * ap
        zq, zp, dg = zq + aq, zp + ap, add_sums(dg, q * aq + p * ap, r <= t, PARTS)
        writes = token_factors(norms, b, scale, unit, 1, C, NORM)[2]
        back = write_state(dstate, U, 1, column, writes, K, W, C, V, BV, PRECISION)
    dg += here[:, None]
    back *= decay(gates, r > t, PARTS)
    dg = add_sums(dg, k * back, r > t, PARTS)
    dq, dk = dq + 32 * I * K, dk + 32 * I * K
    if gate is None:
        zq, zk = zq + own * k, zp + back + own * q
        for level in range(5):
            zq, zk, dg = halves(zq, zk, None, dg, q, k, k, gates, dP, dL, 1 << level, PARTS, PRECISION)
    else:
        zq, zk = zq + own * k, back + own * q
        for level in range(5):
            zq, zk, zp, dg = halves(zq, zk, zp, dg, q, k, p, gates, dP, dL, 1 << level, PARTS, PRECISION)
        of_gate = strength_backward(k.to(tl.float32) * zp, gate, beta_top, RAW_BETA)
        store_channels(db, of_gate, stride, count, c, K, W)
        zk += gate * zp
    store_channels(dq, zq, K, 32, c, K, W)
    store_channels(dk, zk, K, 32, c, K, W)
    return dg, written, rest


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def halved_gradients(
    q, k, g, b_gate, A_log, dt_bias, do, U, dU, states, dstates, dPD, taken, vectors, norms, cu_seqlens,
    fallen, dq, dk, db, dg, dA_log, ddt_bias, N, T, scale, unit, bound, beta_top, q_strides, k_strides, g_strides,
    b_strides, do_strides, H, HV, GROUP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, STRENGTH: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (K + W - 1) // W  # blocks of channels
    slot, hv, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP, BLOCKS)
    column = tl.program_id(0) % BLOCKS * W
    o, c = tl.arange(0, 32), column + tl.arange(0, W)
    ty: tl.constexpr = k.dtype.element_ty
    PARTS: tl.constexpr = 2 if ty == tl.bfloat16 else 3  # an error of e^-76 does not matter
    head, h = slot.to(tl.int64) * HV + hv, hv // GROUP
    strides = (T.to(tl.int64) * HV * K, HV * K, K, 1)
    dg, sums = rows_of(dg, strides, row, hv), head * K + c
    if ty == tl.bfloat16 and tl.min(tl.load(fallen + sums, mask=c < K, other=0.0)) >= -MILD:
        return
    if STRENGTH:
        db, b_gate = rows_of(db, strides, row, hv), rows_of(b_gate, b_strides, row, hv)
    if empty:
        if STRENGTH:
            store_tile(db, strides, tl.zeros([C, W], db.dtype.element_ty), token, stop, column, K, C, W)
        store_tile(dg, strides, tl.zeros([C, W], tl.float32), token, stop, column, K, C, W)
        store_sums(dA_log, ddt_bias, sums, 0.0, 0.0, c < K, HAS_A, HAS_BIAS)
        return
    q, k = rows_of(q, q_strides, row, h), rows_of(k, k_strides, row, h)
    g, do = rows_of(g, g_strides, row, hv), rows_of(do, do_strides, row, hv)
    VP: tl.constexpr = pitch(V)
    U, dU, dPD, taken = U + head * C * VP, dU + head * C * VP, dPD + head * C * C, taken + head * C * C
    dq, dk = dq + head * C * K, dk + head * C * K
    b = vectors + head * 4 * C + 2 * C
    if NORM:
        norms += (slot.to(tl.int64) * H + h) * 3 * C
    state = head * whole_rows(V) * pitch(K)
    states, dstates = states + state, dstates + state
    # first for the earlier half: its decay, and its gradients from writing to the state
    kk = load_channels(k, k_strides, token, stop, c, K, W)
    raw = (g, A_log, dt_bias, bound)
    gi = load_gates(raw, g_strides, BITS, hv, token, stop, c, K, W, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS)[1]
    past = tl.exp2(tl.sum(gi, 1))
    through = past * state_sums(states, dstates, column, K, W, V, BV) * unit
    e = decay(in_parts(gi, PARTS), o[:, None] > o[None, :], PARTS)
    writes = token_factors(norms, b, scale, unit, 0, C, NORM)[2]
    written = write_state(dstates, U, 0, column, writes, K, W, C, V, BV, PRECISION)
    rest, ke = through + tl.sum(kk * e * written, 1), (kk * e).to(ty)
    dA, dbias = tl.zeros([W], tl.float32), tl.zeros([W], tl.float32)
    for step in range(2):  # not unrolled, because long code does not fit the cache for instructions
        I = 1 - step
        at = token + 32 * I
        qq, kk = load_channels(q, q_strides, at, stop, c, K, W), load_channels(k, k_strides, at, stop, c, K, W)
        reads, erases, _ = token_factors(norms, b, scale, unit, I, C, NORM)
        read, erased = read_state(
            states, do, do_strides, dU, at, stop, I, column, reads, erases, K, W, C, V, BV, PRECISION
        )  # fmt: skip
        gi = load_gates(raw, g_strides, BITS, hv, at, stop, c, K, W, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS)[1]
        bb, db_rows = None, None
        if STRENGTH:
            bb = strength_of(load_channels(b_gate, b_strides, at, stop, c, K, W), beta_top, RAW_BETA)
            db_rows = db + at.to(tl.int64) * (HV * K)
        d, written, rest = half_chunk(
            qq, kk, bb, read, erased, dstates, U, gi, norms, b, dPD, taken, ke, written, past, through, rest, scale,
            unit, beta_top, dq, dk, db_rows, HV * K, stop - at, column, I, K, W, C, V, BV, RAW_BETA, NORM, PARTS,
            PRECISION,
        )  # fmt: skip
        a, decays, live, rate, bias = load_gates(  # loaded again, which takes fewer registers
            raw, g_strides, 1.0, hv, at, stop, c, K, W, RAW_GATE, BOUNDED, HAS_A, HAS_BIAS
        )
        if RAW_GATE:
            d, of_A_log = channel_gate_backward(d, decays, a, rate[:, None], bias[:, None], live, BOUNDED)
            dA += tl.sum(of_A_log, 1)
            dbias += tl.sum(d, 1)
        elif BOUNDED:
            d = clamp_backward(d, a, bound)
        store_channels(dg + at.to(tl.int64) * (HV * K), d, HV * K, stop - at, c, K, W)
    store_sums(dA_log, ddt_bias, sums, dA, dbias, c < K, HAS_A, HAS_BIAS)


def needs_halving(p: Problem) -> bool:
    """Whether `channel_gradients` may leave channels to `halved_gradients`."""
    return p.dtype != torch.bfloat16 or p.gate.bound is None


def run_halved_gradients(
    c: Draft, s: Solved, r: Residual, chain: StateGradients, do: Layout, scores: Scores, heads: HeadGradients,
    d: Inputs, t: Tile | None = None,
) -> None:  # fmt: skip
    """Computes the same as `run_channel_gradients`. In bfloat16 it runs after that, and computes only the channels that
    were left to it."""
    p, x = c.p, c.x
    chosen = t or tile("halved_gradients", p, c.chip)
    W = min(chosen.BV, block(p.K))  # channels of one program; values are loaded in blocks
    pointers = (
        x.q, x.k, x.g, x.b, x.A_log, x.dt_bias, do, r.U, chain.dU, r.states, chain.dstates, scores.queries, scores.keys,
        s.vectors, s.norms, x.cu_seqlens, heads.fallen, heads.dq, heads.dk, d.b, d.g, d.A_log, d.dt_bias,
    )  # fmt: skip
    rows, top = map(strides_if, (x.q, x.k, x.g, x.b, do)), p.beta_range if p.channel_strength else None
    scalars = p.N, p.T, p.scale, state_unit(p), p.gate.bound or 0.0, top, *rows
    grid = (count_slots(p) * -(-p.K // W), p.HV, 1)
    launch_rule(c, halved_gradients, pointers, grid, chosen, *scalars, W=W, BV=min(128, block(p.V)), follows=True)
