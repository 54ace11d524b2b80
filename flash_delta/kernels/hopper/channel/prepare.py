"""With a decay per channel: everything that depends on one chunk only. A program computes one chunk and value head
after the other.

    Qg = q . e^G      Kg = k . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}
    P_ij = scale r_q sum_c q_ic e^{G_ic - G_jc} k_jc r_k   i >= j       A = (I + diag(b) L)^{-1} - I

L is P with k for q and without the scale, for i > j. `channel` and `solve` of the ``triton`` backend write the same.
The norms r are in P and A, but not in Qg, Kg and Kd. They are in ``rates``, with the scale and b.

A is stored without its diagonal, which is 1, in float16. Scans round what they multiply by A to float16 (units.py), and
add what the diagonal would give in float32, so most of the result is not rounded for the product.

With a strength per channel Kg and the rows of L have b . k in place of k, and b is 1 elsewhere. In the forward pass, if
kernels of ``triton`` scan, the kernel also writes w . v for them. All other scans multiply by w themselves.

For the backward pass the kernel writes L, with norms and without b. If A has been saved, the kernel does not compute A.

Log decays are given, or made of raw gates (gates.py). With a bound of -5 or more 16 tokens fall by at most 80 nats, and
scores are products (scores.py). Without a bound some scores of a chunk may be computed once more (steep.py). Exponents
are in bits (log2).

The copy engine loads q, k and g. First the kernel sums up the gates of all tokens. Then it takes 32 tokens at a time:
it overwrites q, k and g with decayed q and k, and writes the factors of scores beside them. Tokens after a sequence's
end do not decay. While the kernel computes A, the copy engine loads the next chunk. Gates in float32 also take the
place of ``far``, so the inverse uses other memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from flash_delta.kernels.hopper.channel.forget import all_forget
from flash_delta.kernels.hopper.channel.gates import (
    SUMS,
    WORDS,
    load_erasing,
    parameters,
    rest_living,
    strength_of,
    strengths_of,
    sum_gates,
    write_values,
)
from flash_delta.kernels.hopper.channel.roles import Erasing, HalfTiles, Source, Strengths, Tiles
from flash_delta.kernels.hopper.channel.scores import (
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
from flash_delta.kernels.hopper.channel.steep import CLAMP, is_steep, store_halved_scores, with_halved_scores
from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_store
from flash_delta.kernels.hopper.device.inverse import invert
from flash_delta.kernels.hopper.device.layouts import FLOATS, HALF, NARROW_ROWS, PAIRS, ROW_TILE, ROWS, THREADS, TILE, C
from flash_delta.kernels.hopper.device.rings import barriers, load_box
from flash_delta.kernels.hopper.device.segment_bounds import Chunk, extent, find_segment, first_slot, load_bound, nth
from flash_delta.kernels.hopper.device.state_copies import beside
from flash_delta.kernels.hopper.device.units import to_half
from flash_delta.kernels.hopper.device.work_items import NO_LIST, Listed, Work, count_items
from flash_delta.kernels.hopper.plans.boxes import blocks, ragged, squares, strides
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, PREPARES
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Prepared, Solved
from flash_delta.kernels.triton.forward.values import values_of

LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CHANNELS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128]


@gluon.jit
def store_zeros(o, slot, cu_seqlens, N, T, HV, hv):
    """Writes zeros to o if the slot belongs to the tokens after the last sequence."""
    end = load_bound(cu_seqlens, N, T)
    token = end + (slot - end // C - N) * C
    if token >= end:
        i = token + gl.arange(0, C, layout=gl.SliceLayout(1, WORDS))[:, None]
        c = gl.arange(0, K, layout=gl.SliceLayout(0, WORDS))[None, :]
        at = (i.to(gl.int64) * HV + hv) * K + c
        gl.store(o + at, gl.zeros([C, K], o.dtype.element_ty, WORDS), mask=(i < T) & (c < K))


@gluon.jit
def count_listed(items, work, HV):
    """The number of listed prompts, and the items up to their last chunk. None if their number is outside of this
    launch's range."""
    N = count_items(work, 1)
    start, stop = extent(nth(N - 1, N, work.prompts), work.cu_seqlens, work.T)
    slots = first_slot(N - 1, start, work.T, True) + (stop - start + C - 1) // C
    return N, gl.where(N > 0, gl.minimum(items, slots * HV), 0)


@gluon.jit
def next_chunk(item, items, o, cu_seqlens, N, T, HV, prompts):
    """The program's next `Chunk`, from ``item`` on. ``prompts``: as in `find_segment`."""
    step = gl.num_programs(0)
    own = find_segment(item // HV, C, cu_seqlens, N, T, prompts)
    if cu_seqlens is not None:
        while (item < items) & (own.token >= own.stop):
            if o is not None:
                store_zeros(o, item // HV, cu_seqlens, N, T, HV, item % HV)
            item += step
            own = find_segment(item // HV, C, cu_seqlens, N, T, prompts)
    return Chunk(item, own.row, own.start, gl.where(item < items, own.stop - own.start, 0), own.token - own.start)


@gluon.jit
def ask(chunk, source, HV):
    """Asks for the tiles of a chunk."""
    descs, tiles, batches, heads = source.descs, source.tiles, source.batches, source.heads
    row, start, size, first = chunk.row, chunk.start, chunk.size, chunk.first
    hv = chunk.item % HV
    h = hv // source.group
    of_g, of_keys = source.full.index(0), source.full.index(1)
    mbarrier.expect(of_g, C * K * (4 if descs.g.dtype == gl.float32 else 2))
    load_box(descs.g, row * batches.g + start, size, first, hv * heads.g, of_g, tiles.g.index(0), K)
    mbarrier.expect(of_keys, 2 * C * K * 2)
    load_box(descs.q, row * batches.q + start, size, first, h * heads.q, of_keys, tiles.q.index(0), K)
    load_box(descs.k, row * batches.k + start, size, first, h * heads.k, of_keys, tiles.k.index(0), K)


@gluon.jit
def vectors(
    sq, sk, weights, strengths, norms, rates, saved_b, saved_norms, item, b, left, HV, group, scale, beta_top,
    NORM: gl.constexpr, RAW_BETA: gl.constexpr,
):  # fmt: skip
    """Writes ``rates``, which are norms, with the scale, and b; what is saved of them; and for `weighted` the weights
    of rows and columns. The weights of L's rows contain -b, unless -b is stored in ``strengths``."""
    head, i = item.to(gl.int64), gl.arange(0, C, layout=THREADS)
    b = strength_of(b, beta_top, RAW_BETA)
    b = gl.where(i < left, b, 0.0)
    of_q, of_k = gl.full([C], scale, gl.float32, THREADS), gl.full([C], 1.0, gl.float32, THREADS)
    if NORM:
        r_q = reciprocal_lengths(sq)
        of_q *= r_q
        of_k = reciprocal_lengths(sk)
        norms.store(of_k.reshape([1, C]))
        if saved_norms is not None:  # every value head writes the same numbers
            at = saved_norms + (head // HV * (HV // group) + item % HV // group) * (3 * C) + i
            gl.store(at, r_q)
            gl.store(at + C, of_k)
            gl.store(at + 2 * C, of_k)
    if saved_b is not None:
        gl.store(saved_b + head * 4 * C + 2 * C + i, b)
    gl.store(rates + head * 4 * C + i, of_q)
    gl.store(rates + head * 4 * C + C + i, of_k)
    gl.store(rates + head * 4 * C + 2 * C + i, b)
    weights.slice(0, 32, 1).store(of_q.reshape([2, 32]))
    if strengths is None:
        of_k *= b * -1.0
    else:
        strengths.store((b * -1.0).reshape([1, C]))
    weights.slice(32, 32, 1).store(of_k.reshape([2, 32]))


@gluon.jit
def store_half(tiles, s, erase, middle, totals, h: gl.constexpr, BOUNDED: gl.constexpr):
    """Stores half h of Qg, Kg and Kd in place of q, k and g, and the rows and columns for its scores. ``erase``: the
    half's erase gate, if keys erase with b . k."""
    rows, columns, far = tiles.rows, tiles.columns, tiles.far
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
    kk, e = take(tiles.k, h), gl.exp2(s)
    if BOUNDED:
        near, since = kk * gl.exp2(s * -1.0), block + rest
        put(columns, 0, near)
        put(columns, 1, near * gl.exp2(block).expand_dims(1))
    else:  # one exponential more
        put(columns, 0, kk * gl.exp2(gl.minimum(s * -1.0, CLAMP)))
        near, since = kk * gl.exp2(block.expand_dims(1) - s), rest
        put(columns, 1, near)
    if h == 0:
        put(far, 0, near * gl.exp2(since).expand_dims(1))
        put(far, 1, near * gl.exp2(since + t2).expand_dims(1))
    put(tiles.g, h, near * gl.exp2(since + later + middle).expand_dims(1))
    kk = kk * e
    if erase is not None:
        kk = kk * erase
    put(rows, 1, kk)
    put(tiles.k, h, kk * e_start)
    qq = take(tiles.q, h) * e
    put(rows, 0, qq)
    put(tiles.q, h, qq * e_start)


@gluon.jit
def store_scores(tile, upper, zeros, across, lower):
    """Stores [2, 64, 64]: P, and then L. Their parts are given: the halves with themselves, and the second half with
    the first."""
    tile.slice(0, 32, 1).store(beside(upper, zeros).to(tile.dtype).reshape([2, 32, C]))
    tile.slice(32, 32, 1).store(beside(across, lower).to(tile.dtype).reshape([2, 32, C]))


@gluon.jit
def own_scores(scores, exact, lowest, weights, norms, h: gl.constexpr, steep, NORM: gl.constexpr):
    """The scores of half h with itself."""
    own, near = both(scores)
    if exact is not None:  # noqa: SIM102 (the outer condition is a constant)
        if steep:
            own = with_halved_scores(own, exact, lowest)
    return weighted(near_scores(own, near), h, 32 * h, weights, norms, NORM)


@gluon.jit
def store_inverse(rows, columns, strengths, a_desc, at):
    """Computes A from the L that `store_scores` has left in ``columns``, and stores it without its diagonal."""
    M = reinterpret(columns, gl.float16, [2, C, C], TILE).index(1).load(ROWS).to(gl.float32)
    if strengths is not None:
        M *= strengths.permute([1, 0]).load(ROWS)
    scratch = reinterpret(rows, gl.float16, [4, C, C // 2], HALF)
    sD = reinterpret(columns, gl.float16, [2, 2, 16, 16], PAIRS)
    diagonal, below = invert(M, scratch.index(2), scratch.index(3), sD)
    sa = reinterpret(columns, gl.float16, [C, C], TILE)
    i = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    j = gl.arange(0, C // 2, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    diagonal = gl.where(j == i % 32, 0.0, diagonal)
    sa.store(beside(to_half(gl.where(i < 32, diagonal, below)), to_half(gl.where(i < 32, 0.0, diagonal))))
    fence_async_shared()
    barrier()  # all warps of the program: A is whole in shared memory
    tma_store(a_desc, [at, 0], sa)


NUMBERS = [
    "N", "T", "items", "parted", "least", "most", "q_batch", "k_batch", "g_batch", "b_batch", "v_batch", "w_batch",
    "beta_batch", "HV", "group",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=PER_TOKEN)
def prepare(
    q_desc, k_desc, g_desc, qg_desc, kg_desc, kd_desc, p_desc, l_desc, a_desc, gamma, rates, saved_b, saved_norms, beta,
    A_log, dt_bias, cu_seqlens, o, forgets, prompts, b_gate, v, w, W, N, T, items, parted, least, most, q_batch,
    k_batch, g_batch, b_batch, v_batch, w_batch, heads, b_strides, v_strides, w_strides, scale, bound, beta_top,
    beta_batch, beta_token, beta_head, HV, group, NORM: gl.constexpr, RAW_BETA: gl.constexpr, RAW_GATE: gl.constexpr,
    BOUNDED: gl.constexpr,
):  # fmt: skip
    """``items``: slots times value heads. If o is given, it gets zeros after the last packed sequence. ``parted``: how
    many parts, without first ones, `channel_loop` scans instead if gates forget (forget.py). On a pool ``prompts``
    lists the sequences, and the kernel works only if there are ``least`` to ``most`` of them."""
    gdc_launch_dependents()
    ty: gl.constexpr = q_desc.dtype
    sq1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sk1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sg2 = gl.allocate_shared_memory(ty, [2, C, K], TILE)  # g, and then Kd; far
    rows1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    columns1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    totals = gl.allocate_shared_memory(gl.float32, [4, K], LINE)
    weights = gl.allocate_shared_memory(gl.float32, [2, C], LINE)
    norms = gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    strengths, exact, lowest = None, None, None
    if l_desc is not None:
        strengths = gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    if not BOUNDED:
        exact = gl.allocate_shared_memory(gl.float32, [C, C // 2], LINE)
        lowest = gl.allocate_shared_memory(gl.float32, [1, C], LINE)
    full = barriers(2, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    gates1 = reinterpret(sg2, gl.float32, [1, C, K], FLOATS) if g_desc.dtype == gl.float32 else sg2
    if forgets is not None:
        items = gl.where(all_forget(forgets, parted), 0, items)
    if prompts is not None:
        N, items = count_listed(items, Work(cu_seqlens, T, 0, prompts, least, most), HV)
    descs, batches = Tiles(q_desc, k_desc, g_desc), Tiles(q_batch, k_batch, g_batch)
    source = Source(descs, Tiles(sq1, sk1, gates1), full, batches, Tiles(*heads), group)
    erasing = None if b_gate is None else Erasing(b_gate, b_batch, b_strides)
    RAW_LINE: gl.constexpr = RAW_BETA and b_gate is None
    given = Strengths(A_log, dt_bias, beta, beta_batch, (beta_token, beta_head))
    chunk = next_chunk(gl.program_id(0), items, o, cu_seqlens, N, T, HV, prompts)
    if chunk.item < items:
        ask(chunk, source, HV)
    A, bias, b = parameters(chunk, given, HV)
    t = chunk.item * 0
    while chunk.item < items:
        # 0, but the compiler does not know this. Otherwise it would keep the tiles' addresses in registers over the
        # loop.
        z = t >> 16
        sq, sk, gates, sg, far = sq1.index(z), sk1.index(z), gates1.index(z), sg2.index(z), sg2.index(z + 1)
        rows, columns = rows1.index(z), columns1.index(z)
        tiles = HalfTiles(sq, sk, sg, rows, columns, far)
        item, left = chunk.item, gl.minimum(chunk.size - chunk.first, C)
        erase = None if erasing is None else load_erasing(chunk, erasing, 0, HV)
        if W is not None:
            write_values(chunk, (v, w, W, v_batch, w_batch, v_strides, w_strides), HV, T, RAW_BETA)
        mbarrier.wait(full.index(0), t & 1)  # signalled by the copy engine: g is there
        if RAW_GATE:  # noqa: SIM102 (a constant). Given log decays are zeros there
            if left < C:
                rest_living(gates, left)
        sums, middle = sum_gates(gates, totals, A, bias, bound, RAW_GATE, BOUNDED)
        mbarrier.wait(full.index(1), t & 1)  # signalled by the copy engine: q and k are there
        vectors(
            sq, sk, weights, strengths, norms, rates, saved_b, saved_norms, item, b, left, HV, group, scale, beta_top,
            NORM, RAW_LINE,
        )  # fmt: skip
        if erase is not None:
            erase = strengths_of(erase, beta_top, RAW_BETA)
        tma.store_wait(0)  # the copy engine has read P and A of the chunk before
        barrier()  # all warps of the program: sums of blocks are there, and the norms have read q and k
        steep = False
        if not BOUNDED:
            steep = is_steep(totals)
            if steep:
                store_halved_scores(tiles, sums[0], erase, exact, lowest, 0)
        store_half(tiles, sums[0], erase, middle, totals, 0, BOUNDED)
        erase = None if erasing is None else load_erasing(chunk, erasing, 1, HV)
        fence_async_shared()
        barrier()  # all warps of the program: rows and columns are there
        scores = products(rows, columns)
        scores = warpgroup_mma_wait(0, deps=[scores])
        upper = own_scores(scores, exact, lowest, weights, norms, 0, steep, NORM)
        if erase is not None:
            erase = strengths_of(erase, beta_top, RAW_BETA)
        barrier()  # all warps of the program: the products above have read rows and columns
        if not BOUNDED:  # noqa: SIM102 (the outer condition is a constant)
            if steep:
                store_halved_scores(tiles, sums[1], erase, exact, lowest, 1)
        store_half(tiles, sums[1], erase, middle, totals, 1, BOUNDED)
        fence_async_shared()
        barrier()  # all warps of the program: rows, columns, Qg, Kg and Kd are there
        at = item * C
        tma_store(qg_desc, [at, 0], sq)
        tma_store(kg_desc, [at, 0], sk)
        tma_store(kd_desc, [at, 0], sg)
        scores, across = products(rows, columns), products(rows, far)
        c = gl.arange(0, K, layout=gl.SliceLayout(0, CHANNELS))[None, :]
        total = totals.slice(0, 1, 0).load(CHANNELS) + totals.slice(1, 1, 0).load(CHANNELS)
        total += totals.slice(2, 1, 0).load(CHANNELS) + totals.slice(3, 1, 0).load(CHANNELS)
        gl.store(gamma + item.to(gl.int64) * K + c, gl.exp2(total))
        step = gl.num_programs(0)
        chunk = next_chunk(item + step, items, o, cu_seqlens, N, T, HV, prompts)
        scores, across = warpgroup_mma_wait(0, deps=[scores, across])
        lower = own_scores(scores, exact, lowest, weights, norms, 1, steep, NORM)
        second, third = both(across)
        across = weighted(far_scores(second, third), 1, 0, weights, norms, NORM)
        tma.store_wait(0)  # the copy engine has read Qg, Kg and Kd
        barrier()  # all warps of the program: the products above have read rows, columns and far
        if chunk.item < items:
            ask(chunk, source, HV)
        A, bias, b = parameters(chunk, given, HV)
        # The same products give P and L, so both tiles get both: of ``sp`` only P is used, of ``sl`` only L.
        sp, sl = reinterpret(rows, ty, [2, C, C], ROW_TILE), reinterpret(columns, gl.float16, [2, C, C], ROW_TILE)
        store_scores(sp, upper, upper * 0.0, across, lower)
        store_scores(sl, upper, upper * 0.0, across, lower)
        fence_async_shared()
        barrier()  # all warps of the program: P and L are there
        tma_store(p_desc, [at, 0], reinterpret(rows, ty, [C, C], TILE))
        if l_desc is not None:
            tma_store(l_desc, [at, 0], reinterpret(columns, gl.float16, [2, C, C], TILE).index(1))
        if a_desc is not None:
            store_inverse(rows, columns, strengths, a_desc, at)
        t += 1
    tma.store_wait(0)


def run_prepare(
    c: Draft, out: Prepared, o: Layout | None, L: Layout | None = None, s: Solved | None = None,
    forgets: Layout | None = None, parts: int = 1, listed: Listed = NO_LIST, *, valued: bool = False,
) -> Draft:  # fmt: skip
    """``o`` gets zeros after the last packed sequence. ``L`` and ``s`` are written for the backward pass. With several
    ``parts`` the kernel does nothing if gates forget, which ``forgets`` says. Returns the draft for scans of
    ``triton``, whose values are w . v with a strength per channel, if the launch is ``valued``."""
    p, x = c.p, c.x
    W = values_of(c.made, p) if valued and p.channel_strength else None
    items = out.gamma.shape[0] * p.HV
    *batches, heads = strides(x.q, x.k, x.g)
    gates = x.b, *((None, None) if W is None else (x.v, x.w))
    arguments = (
        *(ragged(t, p.K) for t in (x.q, x.k, x.g)), *(blocks(t, p.K) for t in (out.Qg, out.Kg, out.Kd)),
        *(None if t is None else squares(t) for t in (out.P, L, out.A)), out.gamma, out.rates,
        *((None, None) if s is None else (s.vectors, s.norms)), x.beta, x.A_log, x.dt_bias, x.cu_seqlens, o, forgets,
        listed.prompts, *gates, W, p.N, p.T, items, p.N * p.HV * (parts - 1), listed.least, listed.most, *batches,
        *strides(*gates)[:3], heads, *(t and tokens(t)[:2] for t in gates), p.scale, p.gate.bound or 0.0, p.beta_range,
        batch(x.beta), *tokens(x.beta),
    )  # fmt: skip
    programs = min(items, PREPARES * c.chip.processors)
    # It must not start early if it is the first kernel of its call: then it waits for none.
    launch_rule(c, prepare, arguments, (programs, 1, 1), BY_HAND, follows=listed.prompts is not None)
    return c if W is None else c._replace(x=x._replace(v=W, w=None))
