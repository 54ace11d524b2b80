"""With a decay per channel: a program walks 64 value columns of a state through what `prepare` has written.

A sequence is cut into ``parts``, as many as there are multiprocessors for. Where gates forget, a part depends on the
last few chunks before it only: by then every channel of what came earlier has decayed by 2^-184, which float32 rounds
to nothing. The program of such a part walks these chunks, too, from a state of zeros and without outputs. Where gates
do not forget, the program of the part before walks on.

    load     loads Qg, Kg, Kd, gamma and rates of a chunk into a ring of NS slots, and v, A and P into a ring of NV: one
             warp each
    state    R = b (v - r_k (Kg S0))     U = A R     S1 = gamma . S0 + Kd^T (r_k U)     O = scale r_q (Qg S0) + P U

The state is transposed, S^T [64, K], in float32 accumulators, as in forward/loop.py, whose rules for ptxas hold here,
too. Grid (parts of states, V / 64).

Barriers, and who completes them: ``full`` and ``vfull`` the copy engine (the tiles of a chunk are there), ``done`` the
state group (it has read all of a chunk's tiles, so that its slots are free).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.boxes import blocks, lines, ragged, squares, states, token_stride
from flash_delta.kernels.hopper.channel.scores import K
from flash_delta.kernels.hopper.forward.state_copies import load_state, store_state, store_through
from flash_delta.kernels.hopper.forward.work_items import bounds
from flash_delta.kernels.hopper.gluon_compat import barrier, reinterpret, tma_load
from flash_delta.kernels.hopper.layouts import BOX, LINES, RAGGED, ROWS, THREADS, TILE, C
from flash_delta.kernels.hopper.rings import barriers, load_box, wait_free
from flash_delta.kernels.hopper.segments.bounds import FADED, LEAST, first_slot
from flash_delta.kernels.hopper.tiles import CHANNEL_WALK, walk_parts
from flash_delta.kernels.runtime.arguments import constants_of
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.descriptors import DescribedPlan, launch_described
from flash_delta.kernels.runtime.workspace import Prepared

WIDE_ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64, 128]
FEW = gl.constexpr(8)  # chunks before a part that it may walk, too


@gluon.jit
def chunks_that_fade(gamma, at, HV, chunks):
    """How many of the last chunks before ``at``, of ``chunks`` in all, decay every channel by 2^-184; 0 if the last
    FEW do not."""
    c = gl.arange(0, K, layout=THREADS)
    bits, left = gl.zeros([K], gl.float32, THREADS), gl.zeros([K], gl.int32, THREADS)
    for m in gl.static_range(FEW):
        there = gl.where(m < chunks, K, 0)
        decay = gl.load(gamma + (at - (m + 1) * HV).to(gl.int64) * K + c, mask=c < there, other=1.0)
        bits += gl.where(decay < LEAST, -126.0, gl.log2(decay))
        left += gl.where(bits <= FADED, 0, 1)  # 1 if it is no number
    count = gl.max(left, 0) + 1
    return gl.where(count > FEW, 0, count)


@gluon.jit
def find_part(gamma, cu_seqlens, T, parts, HV: gl.constexpr, PACKED: gl.constexpr):
    """What this program walks: the sequence, value head, the sequence's first token and length; in the sequence the
    first token to walk, the first one with outputs, and the one after the last; and whether it walks at all."""
    item, part = gl.program_id(0) // parts, gl.program_id(0) % parts
    n, hv, start, size = bounds(item, cu_seqlens, None, T, HV, PACKED)
    slot, chunks = first_slot(n, start, T, PACKED) * HV + hv, (size + C - 1) // C
    length = (chunks + parts - 1) // parts
    begin, early = part * length, part * 0
    end = begin + length
    if (part > 0) & (begin < chunks):
        early = chunks_that_fade(gamma, slot + begin * HV, HV, begin)
    walks = (part == 0) | (early > 0)
    going = walks
    while going & (end < chunks):
        going = chunks_that_fade(gamma, slot + end * HV, HV, end) == 0
        end += gl.where(going, length, 0)
    return n, hv, start, size, (begin - early) * C, begin * C, gl.minimum(end * C, size), walks


@gluon.jit
def load_prepared(given, HV: gl.constexpr, KEYS: gl.constexpr, NS: gl.constexpr, PACKED: gl.constexpr):
    """The role that fills a ring: with KEYS with Qg, Kg, Kd, gamma and rates, otherwise with v, A and P."""
    descs, tiles, bars, part, T, v_batch, v_heads = given
    full, done = bars
    n, hv, start, size, first, _, end, walks = part
    SLOTS: gl.constexpr = tiles[0].shape[0]
    head, row = first_slot(n, start, T, PACKED) * HV + hv, start
    if not PACKED:
        row += n * v_batch
    for token in range(first, gl.where(walks, end, first), C):
        t = (token - first) // C
        s, at = t % SLOTS, head + token // C * HV
        wait_free(done, t, SLOTS, NS)  # signalled by the state group, which has left the chunk in this slot
        bar = full.index(s)
        if KEYS:
            mbarrier.expect(bar, 3 * C * K * 2 + 4 * C * 4 + K * 4)
            for m in gl.static_range(3):
                tma_load(descs[m], [at * C, 0], bar, tiles[m].index(s))
            for m in gl.static_range(3, 5):
                tma_load(descs[m], [at, 0], bar, tiles[m].index(s))
        else:
            column = hv * v_heads + gl.program_id(1) * 64
            mbarrier.expect(bar, 3 * C * C * 2)
            load_box(descs[0], row, size, token, column, bar, tiles[0].index(s), 64)
            for m in gl.static_range(1, 3):
                tma_load(descs[m], [at * C, 0], bar, tiles[m].index(s))


@gluon.jit
def state_role(
    so, sbar, shared, HV: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, NS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    o_desc, keys, values, bars, initial, final, part, T = shared
    sq, sk, sd, sr, sg = keys
    sv, sa, sp = values
    full, vfull, done = bars
    n, hv, start, length, first, begin, end, walks = part
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    NV: gl.constexpr = sv.shape[0]
    NO: gl.constexpr = so.shape[0]  # buffers
    zero = gl.zeros([64, C], gl.float32, ROWS)
    item, v = n * HV + hv, gl.program_id(1) * 64
    row = start + length
    if not PACKED:
        row += n * T
    S = gl.zeros([64, K], gl.float32, WIDE_ROWS)
    if INITIAL:  # noqa: SIM102 (a constant)
        if first == 0:
            S = load_state(initial, None, item * K, v, so, sbar, K, V_FIRST, NO, WIDE_ROWS)
    for token in range(first, gl.where(walks, end, first), C):
        t = (token - first) // C
        s, x = t % NS, t % NV
        sb = gl.convert_layout(S.to(ty), operand)
        mbarrier.wait(full.index(s), (t // NS) & 1)  # signalled by the copy engine: Qg, Kg, Kd, rates are there
        of_q, of_k, b = sr.index(s).slice(0, C, 1), sr.index(s).slice(C, C, 1), sr.index(s).slice(2 * C, C, 1)
        E = warpgroup_mma(sb, sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        O = warpgroup_mma(sb, sq.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        mbarrier.wait(vfull.index(x), (t // NV) & 1)  # signalled by the copy engine: v, A and P are there
        E, O = warpgroup_mma_wait(1, deps=[E, O])
        R = sv.index(x).permute([1, 0]).load(ROWS).to(gl.float32)
        R = ((R - E * of_k.load(ROWS)) * b.load(ROWS)).to(ty)
        U = warpgroup_mma(
            gl.convert_layout(R, operand), sa.index(x).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        U, O = warpgroup_mma_wait(1, deps=[U, O])
        O *= of_q.load(ROWS)
        S *= sg.index(s).load(WIDE_ROWS)
        weight = of_k.load(ROWS)
        U = warpgroup_mma_wait(0, deps=[U])
        written = (U * weight).to(ty)
        read = U.to(ty)
        S = warpgroup_mma(gl.convert_layout(written, wide_operand), sd.index(s), S, is_async=True)
        O = warpgroup_mma(gl.convert_layout(read, operand), sp.index(x).permute([1, 0]), O, is_async=True)
        O, S = warpgroup_mma_wait(0, deps=[O, S])
        mbarrier.arrive(done.index(s), count=1)
        if token >= begin:
            tma.store_wait(NO - 1)  # the copy engine has read the next buffer of ``so``
            barrier()  # all warps of the state group: none writes before that
            out = so.index(t % NO)
            box, at = reinterpret(out, ty, [1, 1, C, 64], BOX), RAGGED - length + token
            store_through(out, box, o_desc, (RAGGED, row, at, hv * K + v), O.to(ty), True)
    if walks & (end >= length):
        store_state(final, S, None, item * K, v, so, K, V_FIRST, NO)


@gluon.jit(do_not_specialize=["T", "parts", "v_batch"])
def walk_channels(
    qg_desc, kg_desc, kd_desc, r_desc, gamma_desc, v_desc, a_desc, p_desc, o_desc, initial, final, gamma, cu_seqlens,
    T, parts, v_batch, v_heads, HV: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, PACKED: gl.constexpr,
    NS: gl.constexpr, NV: gl.constexpr, NO: gl.constexpr,
):  # fmt: skip
    ty: gl.constexpr = v_desc.dtype
    sq = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sk = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sd = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [NS, 1, 4 * C], LINES)
    sg = gl.allocate_shared_memory(gl.float32, [NS, 1, K], LINES)
    sv = gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    sa = gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    sp = gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    so = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
    sbar, full, vfull, done = barriers(NO, 1), barriers(NS, 1), barriers(NV, 1), barriers(NS, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    gdc_wait()  # `prepare` has ended: what it wrote is there
    part = find_part(gamma, cu_seqlens, T, parts, HV, PACKED)
    keys, values = (sq, sk, sd, sr, sg), (sv, sa, sp)
    state = (o_desc, keys, values, (full, vfull, done), initial, final, part, T)
    descs = (qg_desc, kg_desc, kd_desc, r_desc, gamma_desc)
    load_keys = (descs, keys, (full, done), part, T, v_batch, v_heads)
    load_values = ((v_desc, a_desc, p_desc), values, (vfull, done), part, T, v_batch, v_heads)
    # The first role gets the registers that the others do not ask for.
    gl.warp_specialize([
        (state_role, (so, sbar, state, HV, INITIAL, V_FIRST, NS, PACKED)),
        (load_prepared, (load_keys, HV, True, NS, PACKED)),
        (load_prepared, (load_values, HV, False, NS, PACKED)),
    ], [1, 1], [24, 24])  # fmt: skip


def run_walk_channels(c: Call, w: Prepared, o: Tensor, final: Tensor) -> None:
    p, x, initial = c.p, c.x, c.x.initial_state
    first = states(p, final if initial is None else initial)
    parts = walk_parts(p, c.shape.chip)
    arguments = (
        *(blocks(t, p.K) for t in (w.Qg, w.Kg, w.Kd)), lines(w.rates.flatten(2).flatten(0, 1)),
        lines(w.gamma.flatten(0, 1)), ragged(x.v, 64), squares(w.A), squares(w.P), ragged(o, 64), first,
        states(p, final), w.gamma, x.cu_seqlens, p.T, parts, token_stride(x.v),
        x.v.stride(2),
    )  # fmt: skip
    constants = constants_of(c, walk_channels, arguments, INITIAL=initial is not None, **CHANNEL_WALK)
    launch_described(c, walk_channels, DescribedPlan((p.N * p.HV * parts, p.V // 64), arguments, constants))
