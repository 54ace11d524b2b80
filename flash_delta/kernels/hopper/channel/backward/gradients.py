"""With a decay per channel, bfloat16 and heads of 128: all gradients of a chunk from the states around it, in one
kernel. A program computes one chunk and head after the other.

    dP = tril(dO U^T)        dL = -tril(dV U^T, -1)        dV = b . dU~
    dq = scale e^G . (dO S0^T) + sum over j <= i of dP_ij e^{G_i - G_j} . k_j
    dp = -e^G . (dV S0^T) + sum over j < i of dL_ij e^{G_i - G_j} . k_j
    dk = e^{G_C - G} . (U dS1^T) + sum over i >= j of e^{G_i - G_j} . (dP_ij q_i + dL_ij k_i)      (and dp, as p is k)
    dg_t = sum over i >= t of (q_i dq_i + k_i dp_i - k_i dk_i) + gamma S0 . dS1 + all that keys write after the chunk
    db = <dU~, R - L U>      dv = dV

With a strength per channel p = b . k and dV = dU~ belong to w . v. So dk gets b . dp, and db = k . dp, dv = w . dV,
dw = v . dV. Then nobody needs R and L, and the kernel loads b in place of them.

In the ``triton`` backend `pairs`, `channel_gradients` and `key_head_gradients` do the same, and the first two pass on
64 KB per chunk through memory. They also read the same U, R, dU~ and states (workspace.py).

First the kernel computes the products over values, by wgmma. Products with states leave [128 channels, 64 tokens] in
registers, and scores go to shared memory. Then it does everything else, 16 tokens at a time, from right to left
(chunk.py). Meanwhile the copy engine loads what the next chunk's products need. The gradients of q, k and g overwrite
them.

Chunks in which a channel falls by very much are rare, and their code needs more registers. So one launch does all other
chunks and notes which are left. Another launch does those (DEEP).

Tiles wait in the memory of dS1, R and L (parking.py). So the kernel asks for these last. They are also needed last.

``full`` has three barriers. The copy engine completes them:

    0    dO, U, dU~ and S0 are there
    1    q, k and g are there
    2    dS1, R and L are there
"""

from collections import namedtuple
from math import log2

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.device.gates import BITS
from flash_delta.kernels.hopper.channel.backward.blocks import (
    CHANNELS,
    OF_CHANNELS,
    SHIFT,
    WIDE,
    K,
    may_be_deep,
)
from flash_delta.kernels.hopper.channel.backward.chunk import chunk_gradients
from flash_delta.kernels.hopper.channel.backward.results import (
    Results,
    of_rows,
    store_nothing,
    store_sums,
    store_values,
    take_values,
)
from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_load, tma_store
from flash_delta.kernels.hopper.device.layouts import BOX, FLOAT_BOX, FLOATS, RAGGED, TILE, C
from flash_delta.kernels.hopper.device.rings import barriers, load_box
from flash_delta.kernels.hopper.device.segment_bounds import Chunk, find_segment
from flash_delta.kernels.hopper.plans.boxes import blocks, ragged, squares, strides
from flash_delta.kernels.hopper.plans.tiles import CHUNK_BACK
from flash_delta.kernels.runtime.arguments import launch_rule, state_unit, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Channels, DeepChunks, Residual, Solved, StateGradients
from flash_delta.problem import Inputs

# In registers, of eight warps.
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [64, 64]
OWN = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))  # [8, 16, 16]: a block for each warp
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# In shared memory.
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BLOCK = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # [.., 16, 16]
SCORES = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [3, 2, 1, 0]))  # the same, [4, 4, 16, 16]

# One of each for what products over values need first, and what they need last: tiles, or descriptors.
ValueTiles = namedtuple("ValueTiles", "do U dU S")
LastTiles = namedtuple("LastTiles", "dS R L")
KeyTiles = namedtuple("KeyTiles", "q k g b", defaults=[None])
HeadGate = namedtuple("HeadGate", "rate bias bound")  # a head's rate, its channels' biases, and the bound


@gluon.jit
def next_deep(item, items, deep):
    """The program's next item from ``item`` on that is noted in ``deep``."""
    found, step, n = items, gl.num_programs(0), gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0]))
    while (item < items) & (found >= items):
        some = item + n * step
        noted = gl.load(deep + some, mask=some < items, other=0)
        found = gl.min(gl.where(noted > 0, some, items), 0)
        item += 256 * step
    return found


@gluon.jit
def next_chunk(item, items, results, cu_seqlens, N, T, HV, deep, DEEP: gl.constexpr):
    """The program's next `Chunk`, from ``item`` on."""
    step = gl.num_programs(0)
    if DEEP:
        item = next_deep(item, items, deep)
    own = find_segment(item // HV, C, cu_seqlens, N, T)
    if cu_seqlens is not None and not DEEP:
        while (item < items) & (own.token >= own.stop):
            store_nothing(item // HV, item % HV, results, cu_seqlens, N, T, HV)
            if deep is not None:
                gl.store(deep + item, 0)
            item += step
            own = find_segment(item // HV, C, cu_seqlens, N, T)
    return Chunk(item, own.row, own.start, gl.where(item < items, own.stop - own.start, 0), own.token - own.start)


@gluon.jit
def ask_values(chunk, descs, tiles, bar, strides, HV):
    """Asks for the tiles that the products of a chunk need first: dO, U, dU~ and S0."""
    item, size, first = chunk.item, chunk.size, chunk.first
    batch, head = strides
    mbarrier.expect(bar, 3 * C * K * 2 + K * K * 2)
    load_box(descs.do, chunk.row * batch + chunk.start, size, first, item % HV * head, bar, tiles.do, K)
    tma_load(descs.U, [item * C, 0], bar, tiles.U)
    tma_load(descs.dU, [item * C, 0], bar, tiles.dU)
    tma_load(descs.S, [item * K, 0], bar, tiles.S)


@gluon.jit
def ask_last(item, descs, tiles, bar):
    """Asks for dS1, R and L, or for dS1 only."""
    mbarrier.expect(bar, K * K * 2 + (0 if descs.R is None else C * K * 2 + C * C * 2))
    tma_load(descs.dS, [item * K, 0], bar, tiles.dS)
    if descs.R is not None:
        tma_load(descs.R, [item * C, 0], bar, tiles.R)
        tma_load(descs.L, [item * C, 0], bar, tiles.L)


@gluon.jit
def ask_keys(chunk, descs, tiles, bar, strides, HV):
    """Asks for q, k and g of a chunk, and for b if there is one."""
    item, size, first = chunk.item, chunk.size, chunk.first
    batches, heads = strides
    COUNT: gl.constexpr = 3 if descs.b is None else 4
    mbarrier.expect(bar, (COUNT - 1) * C * K * 2 + C * K * (4 if descs.g.dtype == gl.float32 else 2))
    for m in gl.static_range(COUNT):
        load_box(descs[m], chunk.row * batches[m] + chunk.start, size, first, item % HV * heads[m], bar, tiles[m], K)


@gluon.jit
def load_factors(item, vectors, norms, NORM: gl.constexpr):
    """b and the norms of q and k of a chunk's tokens. They are loaded early, because loads take long."""
    i = gl.arange(0, C, layout=THREADS)
    head = item.to(gl.int64)
    b = gl.load(vectors + head * 4 * C + 2 * C + i)
    of_q, of_k = b, b
    if NORM:
        of_q, of_k = gl.load(norms + head * 3 * C + i), gl.load(norms + head * 3 * C + C + i)
    return b, of_q, of_k


@gluon.jit
def store_factors(factors, lines, scale, NORM: gl.constexpr):
    """Stores six lines: the factors of what reads from, erases in and writes to a state; b; the squares of the norms of
    q and k."""
    b, of_q, of_k = factors
    if not NORM:
        of_q, of_k = b * 0.0 + 1.0, b * 0.0 + 1.0
    lines.index(0).store((of_q * scale).reshape([1, C]))
    lines.index(1).store((of_k * b).reshape([1, C]))
    lines.index(2).store(of_k.reshape([1, C]))
    lines.index(3).store(b.reshape([1, C]))
    lines.index(4).store((of_q * of_q).reshape([1, C]))
    lines.index(5).store((of_k * of_k).reshape([1, C]))


@gluon.jit
def store_scores(P, M, sL, sP, sM, lines, STRENGTH: gl.constexpr):
    """Stores dP and -dL as blocks, with their factors. Returns what L subtracts from dbeta."""
    i = gl.arange(0, C, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, SQUARE))[None, :]
    of_k = lines.index(2).load(SQUARE)
    M = gl.where(i > j, M, 0.0)
    taken = None
    if not STRENGTH:
        taken = gl.sum(gl.where(i > j, M * sL.load(SQUARE).to(gl.float32), 0.0), 1)
    P = gl.where(i >= j, P * of_k, 0.0) * of_rows(lines, 0, SQUARE)
    M = M * of_k * of_rows(lines, 1, SQUARE)
    reinterpret(sP, sP.dtype, [4, 4, 16, 16], SCORES).store(
        P.to(sP.dtype).reshape([4, 16, 4, 16]).permute([0, 2, 1, 3])
    )
    reinterpret(sM, sM.dtype, [4, 4, 16, 16], SCORES).store(
        M.to(sM.dtype).reshape([4, 16, 4, 16]).permute([0, 2, 1, 3])
    )
    return taken


@gluon.jit
def state_sums(ss, sds):
    """S0 . dS1 of every channel. This is the diagonal of a product, and a warp multiplies its own 16 rows."""
    x = gl.zeros([8, 16, 16], gl.float32, OWN)
    for h in gl.static_range(2):
        s, d = ss.slice(64 * h, 64, 0).permute([1, 0]), sds.slice(64 * h, 64, 0).permute([1, 0])
        s = s.load(gl.DotOperandLayout(0, CHANNELS, 2)).reshape([8, 16, 64])
        d = d.load(gl.DotOperandLayout(0, CHANNELS, 2)).reshape([8, 16, 64]).permute([0, 2, 1])
        s = gl.convert_layout(s, gl.DotOperandLayout(0, OWN, 2))
        x = mma_v2(s, gl.convert_layout(d, gl.DotOperandLayout(1, OWN, 2)), x)
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]
    return gl.convert_layout(gl.sum(gl.where(r == c, x, 0.0), 2).reshape([K]), OF_CHANNELS)


@gluon.jit
def load_parameters(A_log, dt_bias, item, HV):
    """A head's rate, e^A_log, and its channels' biases. The rate is never 0 (device/gates.py)."""
    c = gl.arange(0, K, layout=OF_CHANNELS)
    rate, bias = gl.full([K], 1.0, gl.float32, OF_CHANNELS), gl.full([K], 0.0, gl.float32, OF_CHANNELS)
    if A_log is not None:
        rate *= gl.maximum(gl.exp2(gl.load(A_log + item % HV + c * 0).to(gl.float32) * BITS), 1e-30)
    if dt_bias is not None:
        bias = gl.load(dt_bias + item % HV * K + c).to(gl.float32)
    return rate, bias


@gluon.jit
def store_box(desc, tile, row, size, first, column):
    """Stores the tokens of a sequence that ends before ``row``."""
    box = reinterpret(tile, desc.dtype, [1, 1, C, K], FLOAT_BOX if desc.dtype == gl.float32 else BOX)
    tma_store(desc, (RAGGED, row, RAGGED - size + first, column), box)


NUMBERS = [
    "N", "T", "items", "q_batch", "k_batch", "g_batch", "b_batch", "v_batch", "w_batch", "do_batch", "do_head", "HV"
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def chunk_back(
    q_desc, k_desc, g_desc, b_desc, do_desc, u_desc, lam_desc, r_desc, s_desc, ds_desc, l_desc, dq_desc, dk_desc,
    dg_desc, db_desc, dq, dk, dv, dg, dbeta, db, dw, dA_log, ddt_bias, deep, vectors, norms, v, w, A_log, dt_bias,
    cu_seqlens, N, T, items, q_batch, k_batch, g_batch, b_batch, v_batch, w_batch, do_batch, heads, v_strides,
    w_strides, scale, shift, bound, beta_top, HV, NORM: gl.constexpr, RAW_BETA: gl.constexpr, RAW_GATE: gl.constexpr,
    BOUNDED: gl.constexpr, DEEP: gl.constexpr,
):  # fmt: skip
    """``items``: slots times heads. ``deep``: whether items are left to the launch with DEEP, or None if none is.
    ``shift``: SHIFT less the logarithm of `state_unit`, by which dS1 is divided."""
    gdc_launch_dependents()
    ty: gl.constexpr = q_desc.dtype
    sdo1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    su1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    slam1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sr1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    ss1 = gl.allocate_shared_memory(ty, [1, K, K], TILE)
    sds1 = gl.allocate_shared_memory(ty, [1, K, K], TILE)
    sl1 = gl.allocate_shared_memory(gl.float16, [1, C, C], TILE)
    sparking = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
    sq1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sk1 = gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sg1 = gl.allocate_shared_memory(g_desc.dtype, [1, C, K], FLOATS if g_desc.dtype == gl.float32 else TILE)
    sb1 = None if b_desc is None else gl.allocate_shared_memory(ty, [1, C, K], TILE)
    sP = gl.allocate_shared_memory(ty, [16, 16, 16], BLOCK)
    sM = gl.allocate_shared_memory(ty, [16, 16, 16], BLOCK)
    lines = gl.allocate_shared_memory(gl.float32, [6, 1, C], LINE)
    full = barriers(3, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    results = Results(dq, dk, dv, dg, dbeta, db, dw, dA_log, ddt_bias)
    values, last = ValueTiles(do_desc, u_desc, lam_desc, s_desc), LastTiles(ds_desc, r_desc, l_desc)
    keys, of_keys = KeyTiles(q_desc, k_desc, g_desc, b_desc), ((q_batch, k_batch, g_batch, b_batch), heads[1:])
    of_values, gated = (do_batch, heads[0]), (v, w, v_batch, w_batch, v_strides, w_strides)
    gdc_wait()  # the kernels before this one have ended, and their results can be read
    chunk = next_chunk(gl.program_id(0), items, results, cu_seqlens, N, T, HV, deep, DEEP)
    if chunk.item < items:
        tiles = ValueTiles(sdo1.index(0), su1.index(0), slam1.index(0), ss1.index(0))
        ask_values(chunk, values, tiles, full.index(0), of_values, HV)
        ask_last(chunk.item, last, LastTiles(sds1.index(0), sr1.index(0), sl1.index(0)), full.index(2))
        tiles = KeyTiles(sq1.index(0), sk1.index(0), sg1.index(0), None if sb1 is None else sb1.index(0))
        ask_keys(chunk, keys, tiles, full.index(1), of_keys, HV)
        store_factors(load_factors(chunk.item, vectors, norms, NORM), lines, scale, NORM)
    t = chunk.item * 0
    while chunk.item < items:
        # 0, but the compiler does not know this. Otherwise it would keep the tiles' addresses in registers over the
        # loop.
        n = t >> 16
        sdo, su, slam, sr, ss, sds = (
            sdo1.index(n), su1.index(n), slam1.index(n), sr1.index(n), ss1.index(n), sds1.index(n)
        )  # fmt: skip
        sl, sq, sk, sg = sl1.index(n), sq1.index(n), sk1.index(n), sg1.index(n)
        sb, given = None, None
        if sb1 is not None:
            sb, given = sb1.index(n), take_values(gated, chunk, HV)
        square, wide = gl.zeros([C, C], gl.float32, SQUARE), gl.zeros([K, C], gl.float32, WIDE)
        mbarrier.wait(full.index(0), t & 1)  # signalled by the copy engine: the tiles of the products are there
        barrier()  # all warps of the program: lines are there
        P = warpgroup_mma(sdo, su.permute([1, 0]), square, use_acc=False, is_async=True)
        M = warpgroup_mma(slam, su.permute([1, 0]), square, use_acc=False, is_async=True)
        X = warpgroup_mma(ss.permute([1, 0]), sdo.permute([1, 0]), wide, use_acc=False, is_async=True)
        Y = warpgroup_mma(ss.permute([1, 0]), slam.permute([1, 0]), wide, use_acc=False, is_async=True)
        P, M = warpgroup_mma_wait(2, deps=[P, M])
        mbarrier.wait(full.index(2), t & 1)  # signalled by the copy engine: dS1, R and L are there
        W = warpgroup_mma(sds.permute([1, 0]), su.permute([1, 0]), wide, use_acc=False, is_async=True)
        taken = store_scores(P, M, sl, sP, sM, lines, sb is not None)
        store_values(slam, sr, taken, given, lines, results, chunk, T, HV, beta_top, RAW_BETA)
        through = state_sums(ss, sds)
        X, Y, W = warpgroup_mma_wait(0, deps=[X, Y, W])
        own, item = chunk, chunk.item
        chunk = next_chunk(item + gl.num_programs(0), items, results, cu_seqlens, N, T, HV, deep, DEEP)
        barrier()  # all warps of the program: they have read the tiles of the products, and scores are there
        if chunk.item < items:
            ask_values(chunk, values, ValueTiles(sdo, su, slam, ss), full.index(0), of_values, HV)
        factors = load_factors(gl.minimum(chunk.item, items - 1), vectors, norms, NORM)
        rate, bias = load_parameters(A_log, dt_bias, item, HV)
        mbarrier.wait(full.index(1), t & 1)  # signalled by the copy engine: q, k and g are there
        gate, left_out = HeadGate(rate, bias, bound), False
        if deep is not None and not DEEP:
            left_out = may_be_deep(sg, gate, RAW_GATE)
            gl.store(deep + item, gl.where(left_out, 1, 0))
        if not left_out:
            dA, dbias = chunk_gradients(
                X, Y, W, through, shift, sq, sk, sg, sb, sP, sM, (sds, sr, sl, sparking), lines,
                gl.minimum(own.size - own.first, C), gate, beta_top, NORM, RAW_GATE, RAW_BETA, BOUNDED, DEEP,
            )  # fmt: skip
            store_sums(item, results, dA, dbias)
            fence_async_shared()
        barrier()  # all warps of the program: the gradients are there; they have read lines, scores and parked tiles
        if chunk.item < items:
            ask_last(chunk.item, last, LastTiles(sds, sr, sl), full.index(2))
        if not left_out:
            end = own.row * T + own.start + own.size
            store_box(dq_desc, sq, end, own.size, own.first, item % HV * K)
            store_box(dk_desc, sk, end, own.size, own.first, item % HV * K)
            store_box(dg_desc, sg, end, own.size, own.first, item % HV * K)
            if sb is not None:
                store_box(db_desc, sb, end, own.size, own.first, item % HV * K)
        store_factors(factors, lines, scale, NORM)
        tma.store_wait(0)  # the copy engine has read the gradients
        barrier()  # all warps of the program: none asks earlier
        if chunk.item < items:
            ask_keys(chunk, keys, KeyTiles(sq, sk, sg, sb), full.index(1), of_keys, HV)
        t += 1


def run_chunk_back(
    c: Draft, ch: Channels, s: Solved, r: Residual, chain: StateGradients, deep: DeepChunks, do: Layout, d: Inputs, *,
    rest: bool,
) -> None:  # fmt: skip
    """Launches `chunk_back` for all of ``d`` except the initial state's gradient. Those of A_log and dt_bias are per
    chunk, [slots, HV, K]. ``rest``: for the chunks that the launch without it has left out. With a bound there are
    none."""
    p, x = c.p, c.x
    items, K = count_slots(p) * p.HV, p.K
    of_do, *batches, heads = strides(do, x.q, x.k, x.g, x.b)
    R, L = (None, None) if p.channel_strength else (blocks(r.R, K), squares(ch.L))
    values = (x.v, x.w) if p.channel_strength else (None, None)
    arguments = (
        *(ragged(t, K) for t in (x.q, x.k, x.g, x.b, do)), blocks(r.U, K), blocks(chain.dU, K), R,
        blocks(r.states, K, K), blocks(chain.dstates, K, K), L, *(ragged(t, K) for t in (d.q, d.k, d.g, d.b)),
        d.q, d.k, d.v, d.g, d.beta, d.b, d.w, d.A_log, d.dt_bias, deep.chunks if p.gate.bound is None else None,
        s.vectors, s.norms, *values, x.A_log, x.dt_bias, x.cu_seqlens, p.N, p.T, items, *batches,
        *strides(*values)[:2], of_do, heads, *(t and tokens(t)[:2] for t in values), p.scale,
        SHIFT.value - log2(state_unit(p)), p.gate.bound or 0.0, p.beta_range,
    )  # fmt: skip
    programs = min(items, c.chip.processors)
    launch_rule(c, chunk_back, arguments, (programs, 1, 1), CHUNK_BACK, DEEP=rest, follows=True)
