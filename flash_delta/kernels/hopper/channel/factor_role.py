"""The role that makes of 32 tokens what the states need of them: gates, scores, the inverse.

Decays are taken apart at one place, the middle of the 32 tokens. With u_i = G_i - G_15, which is between 0 and 80 nats
for the first 16 tokens and between -80 and 0 for the others,

    rows     k e^u, then q e^u          columns  k e^{-u}

give all scores by one product, and the states need nothing else: they are kept decayed up to that middle (loop.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_delta.kernels.hopper.channel.gates import BITS, add, gate_constants, log_decays, rest_living
from flash_delta.kernels.hopper.channel.scores import OWN, K, put, reciprocal_lengths, take
from flash_delta.kernels.hopper.forward.inverse import invert_pairs
from flash_delta.kernels.hopper.forward.work_items import bounds
from flash_delta.kernels.hopper.gluon_compat import barrier
from flash_delta.kernels.hopper.layouts import BLOCKS, NARROW_ROWS, THREADS
from flash_delta.kernels.hopper.rings import wait_free

STEP = gl.constexpr(32)  # tokens
SUMS = gl.constexpr(gl.SliceLayout(1, OWN))  # [2, 128]: a number for each block, and channel
CHANNELS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128]


@gluon.jit
def head_parameters(hv, numbers, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """What `log_decays` needs of a value head."""
    A_log, dt_bias, lower_bound, _, _, _, _, _ = numbers
    c = gl.arange(0, K, layout=gl.SliceLayout(0, SUMS))
    A, bias = lower_bound * 0.0, gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, SUMS))
    if A_log is not None:
        A = gl.load(A_log + hv).to(gl.float32)
    if dt_bias is not None:
        bias = gl.load(dt_bias + hv * K + c).to(gl.float32)
    return gate_constants(A, bias, lower_bound, RAW_GATE, BOUNDED)


@gluon.jit
def load_strengths(numbers, n, hv, start, token, length):
    """What b of 32 tokens is made of."""
    _, _, _, _, beta, beta_batch, beta_strides, _ = numbers
    i = gl.arange(0, STEP, layout=THREADS)
    b = gl.full([STEP], 1.0, gl.float32, THREADS)
    if beta is not None:
        at = ((i * 0).to(gl.int64) + n) * beta_batch + (start + token + i).to(gl.int64) * beta_strides[0]
        at += hv * beta_strides[1]
        b = gl.load(beta + at, mask=token + i < length, other=0.0).to(gl.float32)
    return b


@gluon.jit
def store_vectors(sq, sk, b, left, line, weights, numbers, NORM: gl.constexpr, RAW_BETA: gl.constexpr):
    """For the states norms of k, norms of q with the scale, and b; for the scores the weights of rows."""
    _, _, _, scale, _, _, _, beta_top = numbers
    i = gl.arange(0, STEP, layout=THREADS)
    if RAW_BETA:
        b = beta_top / (1.0 + gl.exp2(b * -BITS))
    b = gl.where(i < left, b, 0.0)
    of_k, of_q = gl.full([STEP], 1.0, gl.float32, THREADS), gl.full([STEP], scale, gl.float32, THREADS)
    if NORM:
        of_k = reciprocal_lengths(sk)
        of_q *= reciprocal_lengths(sq)
    line.slice(0, STEP, 1).store(of_k.reshape([1, STEP]))
    line.slice(STEP, STEP, 1).store(of_q.reshape([1, STEP]))
    line.slice(2 * STEP, STEP, 1).store(b.reshape([1, STEP]))
    weights.slice(0, STEP, 1).store((of_k * b * -1.0).reshape([1, STEP]))
    weights.slice(STEP, STEP, 1).store(of_q.reshape([1, STEP]))


@gluon.jit
def sum_from_middle(sg, totals, constants, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """u of all tokens, in bits; ``totals``: the sums of both blocks."""
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    first = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None] == 0
    s = gl.associative_scan(log_decays(take(sg, 0), constants, RAW_GATE, BOUNDED), 1, add)
    last = gl.sum(gl.where(m == 15, s, -0.0), 1)  # to add -0.0 is no instruction
    totals.store(last)
    return s - gl.where(first, last, 0.0).expand_dims(1)


@gluon.jit
def store_decays(totals, before, lead, trail, begins):
    """What a state decays by from the middle of the 32 tokens before, or from the sequence's start, to the middle of
    these, as a root, for it may be e^-160; and from there to their end."""
    since = before.slice(1, 1, 0).load(CHANNELS)
    lead.store(gl.exp2((totals.slice(0, 1, 0).load(CHANNELS) + gl.where(begins, 0.0, since)) * 0.5))
    trail.store(gl.exp2(totals.slice(1, 1, 0).load(CHANNELS)))


@gluon.jit
def store_maps(scores, tile, weights, norms, sD):
    """A and P, of the scores of k and of q: the rows of a tile [64, 32]."""
    scores = scores * weights.permute([1, 0]).load(NARROW_ROWS) * norms.load(NARROW_ROWS)
    even, odd = scores.reshape([4, 16, 2, 16]).permute([0, 1, 3, 2]).split()
    even, odd = gl.convert_layout(even, BLOCKS), gl.convert_layout(odd, BLOCKS)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
    A = invert_pairs(gl.where(w % 2 == 0, even, odd), even, sD)
    row = gl.arange(0, 2 * STEP, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    P = gl.where(column <= row - STEP, scores, 0.0)
    tile.store(gl.where(row < STEP, A, P).to(tile.dtype))


@gluon.jit
def factor_role(
    shared, HV: gl.constexpr, NORM: gl.constexpr, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr,
    RAW_BETA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    scratch, given, made, bars, numbers, work = shared
    totals, weights, sD = scratch
    sq, sk, sg = given
    rows, columns, maps, lines, lead, trail = made
    gfull, full, left_given, ready, done = bars
    cu_seqlens, T, items = work
    NR: gl.constexpr = sq.shape[0]
    NX: gl.constexpr = rows.shape[0]
    zero = gl.zeros([2 * STEP, STEP], gl.float32, NARROW_ROWS)
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, hv, start, length = bounds(item, cu_seqlens, None, T, HV, PACKED)
        if PACKED:
            n = n * 0
        constants = head_parameters(hv, numbers, RAW_GATE, BOUNDED)
        b = load_strengths(numbers, n, hv, start, n * 0, length)
        for token in range(0, length, STEP):
            s, x, turn = t % NR, t % NX, t % 2
            gates, left = sg.index(s), length - token
            mbarrier.wait(gfull.index(s), (t // NR) & 1)  # signalled by the copy engine: g is there
            if RAW_GATE:  # noqa: SIM102 (a constant; the other is none); else the copy engine has left zeros there
                if left < STEP:
                    rest_living(gates, left)
            u = sum_from_middle(gates, totals.index(turn), constants, RAW_GATE, BOUNDED)
            mbarrier.wait(full.index(s), (t // NR) & 1)  # signalled by the copy engine: q and k are there
            wait_free(done, t, NX, NX)  # signalled by the state groups, which have left what lay here
            line = lines.index(x)
            store_vectors(sq.index(s), sk.index(s), b, left, line, weights, numbers, NORM, RAW_BETA)
            e, kk = gl.exp2(u), take(sk.index(s), 0)
            put(rows.index(x), 0, kk * e)
            put(columns.index(x), 0, kk * gl.exp2(u * -1.0))
            put(rows.index(x), 1, take(sq.index(s), 0) * e)
            fence_async_shared()
            barrier()  # all warps of the factor group: rows, columns and vectors are there
            mbarrier.arrive(left_given.index(s), count=1)
            scores = warpgroup_mma(rows.index(x), columns.index(x).permute([1, 0]), zero, use_acc=False, is_async=True)
            store_decays(totals.index(turn), totals.index(1 - turn), lead.index(x), trail.index(x), token == 0)
            b = load_strengths(numbers, n, hv, start, token + STEP, length)
            scores = warpgroup_mma_wait(0, deps=[scores])
            store_maps(scores, maps.index(x), weights, line.slice(0, STEP, 1), sD)
            fence_async_shared()
            mbarrier.arrive(ready.index(x), count=1)
            t += 1
