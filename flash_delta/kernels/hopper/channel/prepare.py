"""With a decay per channel: all that a chunk's tokens are to each other, by one program per chunk and value head.

    Qg = q . e^G      Kg = k . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}
    P_ij = scale r_q sum_c q_ic e^{G_ic - G_jc} k_jc r_k   i >= j       A = (I + diag(b) L)^{-1}

L is P with k for q and without the scale, i > j. The same as `channel` and `solve` of the ``triton`` backend write:
norms, r, are in P and A but not in Qg, Kg and Kd. They are in ``rates``, with the scale and b.

Log decays are made of raw gates, lower_bound sigmoid(e^A_log (a + dt_bias)), so that 16 tokens fall by 80 nats at most
(scores.py). Exponents are in bits (log2).

The copy engine loads q, k and g. First the gates of all tokens are summed up; then, 32 tokens at a time, decayed q and
k are written over q, k and g, and beside them what scores are made of. Tokens behind a sequence's end do not decay.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.hopper.boxes import blocks, ragged, squares, strides
from flash_delta.kernels.hopper.channel.scores import (
    OWN,
    TOKENS,
    K,
    both,
    far_scores,
    near_scores,
    products,
    put,
    reciprocal_lengths,
    take,
    weighted,
)
from flash_delta.kernels.hopper.forward.inverse import invert
from flash_delta.kernels.hopper.gluon_compat import barrier, reinterpret, tma_store
from flash_delta.kernels.hopper.layouts import HALF, PAIRS, ROW_TILE, ROWS, THREADS, TILE, C
from flash_delta.kernels.hopper.rings import barriers, load_box
from flash_delta.kernels.hopper.segments.bounds import find_segment, load_bound
from flash_delta.kernels.hopper.tiles import PREPARE
from flash_delta.kernels.runtime.arguments import batch, constants_of, tokens
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.descriptors import DescribedPlan, launch_described
from flash_delta.kernels.runtime.workspace import Prepared

BITS = gl.constexpr(1.4426950408889634)
SUMS = gl.constexpr(gl.SliceLayout(1, OWN))  # [2, 128]: a number for each block of a half, and channel
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ZEROS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [64, 128]
CHANNELS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128]


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def store_zeros(o, slot, cu_seqlens, N, T, HV, hv):
    """Writes zeros to o if the slot belongs to the tokens after the last sequence."""
    end = load_bound(cu_seqlens, N, T)
    token = end + (slot - end // C - N) * C
    if token >= end:
        i = token + gl.arange(0, C, layout=gl.SliceLayout(1, ZEROS))[:, None]
        c = gl.arange(0, K, layout=gl.SliceLayout(0, ZEROS))[None, :]
        at = (i.to(gl.int64) * HV + hv) * K + c
        gl.store(o + at, gl.zeros([C, K], o.dtype.element_ty, ZEROS), mask=(i < T) & (c < K))


@gluon.jit
def rest_living(sg, left):
    """Gives tokens from ``left`` on the activation whose log decay is 0."""
    for h in gl.static_range(2):
        i = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, TOKENS))[:, None]
        half = sg.slice(32 * h, 32, 0)
        half.store(gl.where(i < left, half.load(TOKENS).to(gl.float32), float("-inf")).to(sg.dtype))
    barrier()  # all warps of the program: it reads what others have written


@gluon.jit
def sum_gates(sg, totals, A_log, dt_bias, hv, lower_bound):
    """The sums of log decays from each block's start, for both halves, and ``middle``, which they all have been moved
    up by. ``totals``: of whole blocks, as they are."""
    rate = -BITS
    if A_log is not None:
        rate = gl.maximum(gl.exp2(gl.load(A_log + hv).to(gl.float32) * BITS), 1e-30) * -BITS
    shift = 0.0
    if dt_bias is not None:
        c = gl.arange(0, K, layout=gl.SliceLayout(0, SUMS))
        shift = (gl.load(dt_bias + hv * K + c).to(gl.float32) * rate)[None, :].expand_dims(1)
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    inverse, middle = -1.0 / (lower_bound * BITS), lower_bound * BITS * -8.0
    sums = ()
    for h in gl.static_range(2):
        # the square of a reciprocal root needs no division; a square is added by one instruction
        root = gl.rsqrt(inverse + inverse * gl.exp2(take(sg, h) * rate + shift))
        decay = root * root * -1.0
        s = gl.associative_scan(gl.where(m == 0, decay + middle, decay), 1, add)
        last = gl.sum(gl.where(m == 15, s, -0.0), 1)  # to add -0.0 is no instruction
        totals.slice(2 * h, 2, 0).store(last - middle)
        sums += (s,)
    return sums, middle


@gluon.jit
def vectors(sq, sk, weights, norms, rates, beta, at, left, scale, beta_top, token_stride,
            NORM: gl.constexpr, RAW_BETA: gl.constexpr):  # fmt: skip
    """Writes ``rates``: norms, with the scale, and b; and for `weighted` those of rows and columns."""
    i = gl.arange(0, C, layout=THREADS)
    b = gl.where(i < left, 1.0, 0.0)
    if beta is not None:
        b = gl.load(beta + at + i.to(gl.int64) * token_stride, mask=i < left, other=0.0).to(gl.float32)
        if RAW_BETA:
            b = gl.where(i < left, beta_top / (1.0 + gl.exp2(b * -BITS)), 0.0)
    of_q, of_k = gl.full([C], scale, gl.float32, THREADS), gl.full([C], 1.0, gl.float32, THREADS)
    if NORM:
        of_q *= reciprocal_lengths(sq)
        of_k = reciprocal_lengths(sk)
        norms.store(of_k.reshape([1, C]))
    gl.store(rates + i, of_q)
    gl.store(rates + C + i, of_k)
    gl.store(rates + 2 * C + i, b)
    weights.slice(0, 32, 1).store(of_q.reshape([2, 32]))
    weights.slice(32, 32, 1).store((of_k * b * -1.0).reshape([2, 32]))


@gluon.jit
def store_half(tiles, s, middle, totals, h: gl.constexpr):
    """Half h of Qg, Kg, Kd, over q, k and g, and what its scores are made of."""
    sq, sk, sg, rows, columns, far = tiles
    t0, t1 = totals.slice(0, 1, 0).load(SUMS), totals.slice(1, 1, 0).load(SUMS)
    t2, t3 = totals.slice(2, 1, 0).load(SUMS), totals.slice(3, 1, 0).load(SUMS)
    first = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None] == 0
    if h == 0:
        start, block, rest = gl.where(first, 0.0, t0), gl.where(first, t0, t1), gl.where(first, t1, 0.0)
        later = t2 + t3
    else:
        start, block, rest = gl.where(first, t0 + t1, t0 + t1 + t2), gl.where(first, t2, t3), gl.where(first, t3, 0.0)
        later = 0.0
    e_start = gl.exp2(start - middle).expand_dims(1)
    kk, e = take(sk, h), gl.exp2(s)
    own = kk * gl.exp2(s * -1.0)
    put(columns, 0, own)
    put(columns, 1, own * gl.exp2(block).expand_dims(1))
    if h == 0:
        put(far, 0, own * gl.exp2(block + rest).expand_dims(1))
        put(far, 1, own * gl.exp2(block + rest + t2).expand_dims(1))
    put(sg, h, own * gl.exp2(block + rest + later + middle).expand_dims(1))
    kk = kk * e
    put(rows, 1, kk)
    put(sk, h, kk * e_start)
    qq = take(sq, h) * e
    put(rows, 0, qq)
    put(sq, h, qq * e_start)


@gluon.jit
def store_scores(tile, upper, zeros, across, lower):
    """Stores the parts of P and L, [2, 64, 64]."""
    tile.slice(0, 32, 1).slice(0, 32, 2).store(upper.to(tile.dtype).reshape([2, 32, 32]))
    if zeros is not None:
        tile.slice(0, 32, 1).slice(32, 32, 2).store(zeros.to(tile.dtype).reshape([2, 32, 32]))
    tile.slice(32, 32, 1).slice(0, 32, 2).store(across.to(tile.dtype).reshape([2, 32, 32]))
    tile.slice(32, 32, 1).slice(32, 32, 2).store(lower.to(tile.dtype).reshape([2, 32, 32]))


@gluon.jit(do_not_specialize=["N", "T", "q_batch", "k_batch", "g_batch", "HV", "group", "beta_batch"])
def prepare(
    q_desc, k_desc, g_desc, qg_desc, kg_desc, kd_desc, p_desc, a_desc, gamma, rates, beta, A_log, dt_bias, cu_seqlens,
    o, N, T, q_batch, k_batch, g_batch, heads, group, HV, scale, lower_bound, beta_top, beta_batch, beta_strides,
    PACKED: gl.constexpr, NORM: gl.constexpr, RAW_BETA: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    slot, hv = gl.program_id(0) // HV, gl.program_id(0) % HV
    _, row, token, start, stop, _, _ = find_segment(slot, C, cu_seqlens, N, T, PACKED)
    if token >= stop:
        if PACKED and o is not None:
            store_zeros(o, slot, cu_seqlens, N, T, HV, hv)
        return
    ty: gl.constexpr = q_desc.dtype
    sq = gl.allocate_shared_memory(ty, [C, K], TILE)
    sk = gl.allocate_shared_memory(ty, [C, K], TILE)
    sg = gl.allocate_shared_memory(ty, [C, K], TILE)
    rows = gl.allocate_shared_memory(ty, [C, K], TILE)
    columns = gl.allocate_shared_memory(ty, [C, K], TILE)
    far = gl.allocate_shared_memory(ty, [C, K], TILE)
    totals = gl.allocate_shared_memory(gl.float32, [4, K], LINE)
    weights = gl.allocate_shared_memory(gl.float32, [2, C], LINE)
    norms = gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    full = barriers(2, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    size, first, h, left = stop - start, token - start, hv // group, gl.minimum(stop - token, C)
    mbarrier.expect(full.index(0), C * K * 2)
    load_box(g_desc, row * g_batch + start, size, first, hv * heads[2], full.index(0), sg, K)
    mbarrier.expect(full.index(1), 2 * C * K * 2)
    load_box(q_desc, row * q_batch + start, size, first, h * heads[0], full.index(1), sq, K)
    load_box(k_desc, row * k_batch + start, size, first, h * heads[1], full.index(1), sk, K)
    mbarrier.wait(full.index(0), 0)  # signalled by the copy engine: g is there
    if left < C:
        rest_living(sg, left)
    sums, middle = sum_gates(sg, totals, A_log, dt_bias, hv, lower_bound)
    at = row.to(gl.int64) * beta_batch + token.to(gl.int64) * beta_strides[0] + hv * beta_strides[1]
    head = slot.to(gl.int64) * HV + hv
    mbarrier.wait(full.index(1), 0)  # signalled by the copy engine: q and k are there
    vectors(sq, sk, weights, norms, rates + head * 4 * C, beta, at, left, scale, beta_top, beta_strides[0], NORM,
            RAW_BETA)  # fmt: skip
    barrier()  # all warps of the program: sums of blocks are there, and the norms have read q and k
    tiles = (sq, sk, sg, rows, columns, far)
    store_half(tiles, sums[0], middle, totals, 0)
    fence_async_shared()
    barrier()  # all warps of the program: rows and columns are there
    scores = products(rows, columns)
    scores = warpgroup_mma_wait(0, deps=[scores])
    own, near = both(scores)
    upper = weighted(near_scores(own, near), 0, 0, weights, norms, NORM)
    barrier()  # all warps of the program: the products above have read rows and columns
    store_half(tiles, sums[1], middle, totals, 1)
    fence_async_shared()
    barrier()  # all warps of the program: rows and columns are there, and Qg, Kg and Kd
    at = (slot * HV + hv) * C
    tma_store(qg_desc, [at, 0], sq)
    tma_store(kg_desc, [at, 0], sk)
    tma_store(kd_desc, [at, 0], sg)
    scores, across = products(rows, columns), products(rows, far)
    c = gl.arange(0, K, layout=gl.SliceLayout(0, CHANNELS))[None, :]
    total = totals.slice(0, 1, 0).load(CHANNELS) + totals.slice(1, 1, 0).load(CHANNELS)
    total += totals.slice(2, 1, 0).load(CHANNELS) + totals.slice(3, 1, 0).load(CHANNELS)
    gl.store(gamma + head * K + c, gl.exp2(total))
    scores, across = warpgroup_mma_wait(0, deps=[scores, across])
    own, near = both(scores)
    lower = weighted(near_scores(own, near), 1, 32, weights, norms, NORM)
    second, third = both(across)
    across = weighted(far_scores(second, third), 1, 0, weights, norms, NORM)
    barrier()  # all warps of the program: the products above have read rows, columns and far
    # Rows of P and of L come together: what is beside P, and what is in front of L, is not used.
    sp, sl = reinterpret(rows, ty, [2, C, C], ROW_TILE), reinterpret(columns, gl.float16, [2, C, C], ROW_TILE)
    store_scores(sp, upper, upper * 0.0, across, lower)
    store_scores(sl, upper, None, across, lower)
    fence_async_shared()
    barrier()  # all warps of the program: P and L are there
    tma_store(p_desc, [at, 0], reinterpret(rows, ty, [C, C], TILE))
    M = reinterpret(columns, gl.float16, [2, C, C], TILE).index(1).load(ROWS).to(gl.float32)
    scratch = reinterpret(far, gl.float16, [4, C, C // 2], HALF)
    sD = reinterpret(scratch.index(2), gl.float16, [2, 2, 16, 16], PAIRS)
    left_part, right_part = invert(M, None, scratch.index(0), scratch.index(1), sD, True)
    sa = reinterpret(columns, ty, [C, C], TILE)
    sa.slice(0, 32, 1).store(left_part.to(ty))
    sa.slice(32, 32, 1).store(right_part.to(ty))
    fence_async_shared()
    barrier()  # all warps of the program: A is whole in shared memory
    tma_store(a_desc, [at, 0], sa)
    tma.store_wait(0)


def run_prepare(c: Call, out: Prepared, o: Tensor | None) -> None:
    """``o`` gets zeros after the last packed sequence, if it is there."""
    p, x = c.p, c.x
    *batches, heads = strides(x.q, x.k, x.g)
    arguments = (
        *(ragged(t, p.K) for t in (x.q, x.k, x.g)), *(blocks(t, p.K) for t in (out.Qg, out.Kg, out.Kd)),
        squares(out.P), squares(out.A), out.gamma, out.rates, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, o, p.N, p.T,
        *batches, heads, p.HV // p.H, p.HV, p.scale, p.lower_bound, p.beta_range, batch(x.beta), tokens(x.beta),
    )  # fmt: skip
    constants = constants_of(c, prepare, arguments)
    launch_described(c, prepare, DescribedPlan((count_slots(p) * p.HV,), arguments, constants), **PREPARE)
