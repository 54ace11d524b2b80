"""The role that gates the keys and queries of 32 tokens, so that all scores are one product.

Decays are taken apart at one place, near the middle of the 32 tokens. With G from their start on, and n the whole part
of G_15 in bits, let u = G - n. It is at most 116 bits for the first 16 tokens, and at least -116 for the others, if no
gate is below -5 nats: bfloat16 holds all of

    rows     k 2^u, then q 2^u          columns  k 2^{-u}

The states need nothing else: they are multiplied by 2^n before (loop.py). n depends on tokens that come later than
some of the 16. But it is whole, so that it changes no number but by a power of two: no token changes a bit of what is
found of tokens before it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_delta.kernels.hopper.channel.gates import BITS, add, gate_constants, log_decays, rest_living
from flash_delta.kernels.hopper.channel.scores import OWN, K, put, squared_lengths_of_two, take
from flash_delta.kernels.hopper.forward.work_items import bounds
from flash_delta.kernels.hopper.gluon_compat import barrier
from flash_delta.kernels.hopper.layouts import THREADS
from flash_delta.kernels.hopper.rings import wait_free

STEP = gl.constexpr(32)  # tokens
SUMS = gl.constexpr(gl.SliceLayout(1, OWN))  # [2, 128]: a number for each block of 16, and channel
CHANNELS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128]


@gluon.jit
def head_parameters(hv, numbers, RAW_GATE: gl.constexpr):
    """What `log_decays` needs of a value head."""
    A_log, dt_bias, lower_bound = numbers[0], numbers[1], numbers[2]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, SUMS))
    A, bias = lower_bound * 0.0, gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, SUMS))
    if A_log is not None:
        A = gl.load(A_log + hv).to(gl.float32)
    if dt_bias is not None:
        bias = gl.load(dt_bias + hv * K + c).to(gl.float32)
    return gate_constants(A, bias, lower_bound, RAW_GATE, True)


@gluon.jit
def load_strengths(numbers, row, hv, start, token, length):
    """What b of 32 tokens is made of, twice."""
    beta, beta_batch, beta_strides = numbers[4], numbers[5], numbers[6]
    i = gl.arange(0, 2 * STEP, layout=THREADS) % STEP
    b = gl.full([2 * STEP], 1.0, gl.float32, THREADS)
    if beta is not None:
        at = ((i * 0).to(gl.int64) + row) * beta_batch + (start + token + i).to(gl.int64) * beta_strides[0]
        b = gl.load(beta + (at + hv * beta_strides[1]), mask=token + i < length, other=0.0).to(gl.float32)
    return b


@gluon.jit
def store_vectors(sq, sk, b, left, norms, strengths, numbers, NORM: gl.constexpr, RAW_BETA: gl.constexpr):
    """Norms of k, and then those of q with the scale; b, twice."""
    scale, beta_top = numbers[3], numbers[7]
    i = gl.arange(0, 2 * STEP, layout=THREADS)
    if RAW_BETA:
        b = beta_top / (1.0 + gl.exp2(b * -BITS))
    strengths.store(gl.where(i % STEP < left, b, 0.0).reshape([1, 2 * STEP]))
    if NORM:
        lengths = gl.rsqrt(squared_lengths_of_two(sk, sq) + 1e-6)
        of_q = gl.arange(0, 2, layout=gl.SliceLayout(1, lengths.type.layout))[:, None] == 1
        norms.store((lengths * gl.where(of_q, scale, 1.0)).reshape([1, 2 * STEP]))
    else:
        norms.store(gl.where(i < STEP, 1.0, scale).reshape([1, 2 * STEP]))


@gluon.jit
def sum_blocks(sg, totals, constants, RAW_GATE: gl.constexpr):
    """The sums of log decays from each block's start; ``totals``: of whole blocks."""
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    s = gl.associative_scan(log_decays(take(sg, 0), constants, RAW_GATE, True), 1, add)
    totals.store(gl.sum(gl.where(m == 15, s, -0.0), 1))  # to add -0.0 is no instruction
    return s


@gluon.jit
def power(n):
    """2^n of int32, where it is normal."""
    return ((n + 127) * (1 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def store_tiles(sq, sk, s, totals, rows, columns):
    """One store for all rows, for a second one would wait for the first."""
    first = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None] == 0
    total = totals.slice(0, 1, 0).load(SUMS)
    n = total.to(gl.int32)
    s += gl.where(first, 0.0, total - n.to(gl.float32)).expand_dims(1)
    up, down = gl.where(first, power(n * -1), 1.0).expand_dims(1), gl.where(first, power(n), 1.0).expand_dims(1)
    e, kk = gl.exp2(s) * up, take(sk, 0)
    put(columns, 0, kk * (gl.exp2(s * -1.0) * down))
    k, q = (kk * e).to(rows.dtype), (take(sq, 0) * e).to(rows.dtype)
    rows.store(gl.join(k, q).permute([3, 0, 1, 2]).reshape([2 * STEP, K]))


@gluon.jit
def store_decays(totals, lead, trail):
    """What states are multiplied by before the tokens, 2^n, and after them."""
    total = totals.slice(0, 1, 0).load(CHANNELS)
    n = total.to(gl.int32)
    lead.store(power(n))
    trail.store(gl.exp2(total - n.to(gl.float32) + totals.slice(1, 1, 0).load(CHANNELS)))


@gluon.jit
def gate_role(
    shared, HV: gl.constexpr, NORM: gl.constexpr, RAW_GATE: gl.constexpr, RAW_BETA: gl.constexpr, PACKED: gl.constexpr
):
    """shared: (totals, given, made, bars, numbers, work), of which ``given`` are the tiles that are loaded, ``made``
    those that roles hand on, and ``numbers`` A_log, dt_bias, the bound, the scale, beta with its strides, and what its
    sigmoid is multiplied by."""
    totals, given, made, bars, numbers, work = shared
    sq, sk, sg = given
    rows, columns, norms, strengths, lead, trail = made[0], made[1], made[3], made[4], made[5], made[6]
    gfull, full, left_given, tiled, done = bars[0], bars[1], bars[2], bars[3], bars[5]
    cu_seqlens, T, items = work
    NR: gl.constexpr = sq.shape[0]
    NX: gl.constexpr = rows.shape[0]
    t = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, hv, start, length = bounds(item, cu_seqlens, None, T, HV, PACKED)
        if PACKED:
            n = n * 0
        constants = head_parameters(hv, numbers, RAW_GATE)
        b = load_strengths(numbers, n, hv, start, n * 0, length)
        for token in range(0, length, STEP):
            s, x = t % NR, t % NX
            gates, left = sg.index(s), length - token
            mbarrier.wait(gfull.index(s), (t // NR) & 1)  # signalled by the copy engine: g is there
            if RAW_GATE:  # noqa: SIM102 (a constant; the other is none); else the copy engine has left zeros there
                if left < STEP:
                    rest_living(gates, left)
            sums = sum_blocks(gates, totals, constants, RAW_GATE)
            mbarrier.wait(full.index(s), (t // NR) & 1)  # signalled by the copy engine: q and k are there
            wait_free(done, t, NX, NX)  # signalled by the state group, which has left what lay here
            store_vectors(
                sq.index(s), sk.index(s), b, left, norms.index(x), strengths.index(x), numbers, NORM, RAW_BETA
            )
            barrier()  # all warps of the gate group: sums of blocks are there
            store_tiles(sq.index(s), sk.index(s), sums, totals, rows.index(x), columns.index(x))
            store_decays(totals, lead.index(x), trail.index(x))
            b = load_strengths(numbers, n, hv, start, token + STEP, length)
            fence_async_shared()
            barrier()  # all warps of the gate group: they have read q, k and sums
            mbarrier.arrive(left_given.index(s), count=1)
            mbarrier.arrive(tiled.index(x), count=1)
            t += 1
