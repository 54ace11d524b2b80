"""With a decay per channel: the scan through the chunks that `prepare` has written. A program scans one state after the
other, 64 value columns of each.

    load     loads Qg, Kg, Kd, gamma and rates of a chunk into a ring of NS slots, and v (and w), A and P into a ring
             of NV: one warp each
    state    R = b (v - r_k (Kg S0))     U = A R + R     S1 = gamma . S0 + Kd^T (r_k U)     O = scale r_q (Qg S0) + P U

With a strength per channel R is w . v - r_k (Kg S0). A is float16 (units.py) and lacks its diagonal (prepare.py). The
state is transposed, S^T [64, K], in float32 accumulators, as in scalar/forward/loop.py. The rules there for ptxas hold
here, too. Grid (programs, V / 64). On a pool the states are those of listed prompts (plans/prompt_list.py). They are
read from slots and written to slots, and also to checkpoints.

Barriers, and who completes them:

    full     the copy engine: Qg, Kg, Kd, gamma and rates of a chunk are there
    vfull    the copy engine: v, w, A and P are there
    done     the state group: it has read all tiles of a chunk, so that its slots are free
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_delta.kernels.hopper.channel.forget import all_forget
from flash_delta.kernels.hopper.channel.gates import strengths_of
from flash_delta.kernels.hopper.channel.roles import ChunkKeys, ChunkValues
from flash_delta.kernels.hopper.channel.scores import K
from flash_delta.kernels.hopper.device import checkpoints
from flash_delta.kernels.hopper.device.checkpoints import Checkpoints, checkpoint_values, find_checkpoint, find_offset
from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_load
from flash_delta.kernels.hopper.device.layouts import BOX, LINES, RAGGED, ROWS, TILE, C
from flash_delta.kernels.hopper.device.rings import barriers, end_barriers, load_box, wait_free
from flash_delta.kernels.hopper.device.segment_bounds import first_slot
from flash_delta.kernels.hopper.device.state_copies import load_state, store_state, store_through
from flash_delta.kernels.hopper.device.units import units
from flash_delta.kernels.hopper.device.work_items import NO_LIST, Listed, Work, bounds, count_items, ends
from flash_delta.kernels.hopper.plans.boxes import blocks, lines, pool, ragged, squares, states, strides
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, CHANNEL_SCAN
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.plan import Descriptor, Draft, Layout
from flash_delta.kernels.runtime.workspace import Prepared
from flash_delta.problem import Slots

WIDE_ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64, 128]


@gluon.jit
def load_prepared(
    descs, tiles, full, done, work, places, HV, KEYS: gl.constexpr, NS: gl.constexpr,
):  # fmt: skip
    """The role that fills a ring. With KEYS it loads `ChunkKeys`, otherwise `ChunkValues`. ``places``: the tokens
    between batch rows of v and of w, and their strides between heads."""
    v_batch, w_batch, v_heads, w_heads = places
    T = work.T
    SLOTS: gl.constexpr = full.shape[0]
    gdc_wait()  # `prepare` has ended, and its results can be read
    t = 0
    for item in range(gl.program_id(0), count_items(work, HV), gl.num_programs(0)):
        own = bounds(item, work, HV)
        n, hv, start, size = own.n, own.hv, own.start, own.size
        if work.prompts is not None:
            n = item // HV  # its number in the list
        head, row = first_slot(n, start, T, work.cu_seqlens is not None) * HV + hv, start
        if work.cu_seqlens is None:
            row += n * v_batch
        for token in range(0, size, C):
            s, at = t % SLOTS, head + token // C * HV
            wait_free(done, t, SLOTS, NS)  # signalled by the state group, which has read the chunk in this slot
            bar = full.index(s)
            if KEYS:
                mbarrier.expect(bar, 3 * C * K * 2 + 4 * C * 4 + K * 4)
                for m in gl.static_range(3):
                    tma_load(descs[m], [at * C, 0], bar, tiles[m].index(s))
                for m in gl.static_range(3, 5):
                    tma_load(descs[m], [at, 0], bar, tiles[m].index(s))
            else:
                column = hv * v_heads + gl.program_id(1) * 64
                mbarrier.expect(bar, (3 if descs.w is None else 4) * C * C * 2)
                load_box(descs.v, row, size, token, column, bar, tiles.v.index(s), 64)
                if descs.w is not None:
                    column = hv * w_heads + gl.program_id(1) * 64
                    w_row = start if work.cu_seqlens is not None else start + n * w_batch
                    load_box(descs.w, w_row, size, token, column, bar, tiles.w.index(s), 64)
                for m in gl.static_range(1, 3):
                    tma_load(descs[m], [at * C, 0], bar, tiles[m].index(s))
            t += 1


@gluon.jit
def state_role(
    so, sbar, o_desc, initial, final, keys, values, full, vfull, done, checkpoints, work, HV,
    INITIAL: gl.constexpr, V_FIRST: gl.constexpr, RAW_BETA: gl.constexpr, NS: gl.constexpr,
):  # fmt: skip
    """Carries the state. ``keys``, ``values``: `ChunkKeys` and `ChunkValues`. ``checkpoints``: `Checkpoints`."""
    sr, sv, T = keys.rates, values.v, work.T
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = keys.Kg.dtype
    NV: gl.constexpr = sv.shape[0]
    NO: gl.constexpr = so.shape[0]  # buffers
    zero = gl.zeros([64, C], gl.float32, ROWS)
    v, t = gl.program_id(1) * 64, 0
    for item in range(gl.program_id(0), count_items(work, HV), gl.num_programs(0)):
        own = bounds(item, work, HV)
        n, hv, start, length = own.n, own.hv, own.start, own.size
        row, state = start + length, item * K
        source, target = None, None
        if work.prompts is not None:
            source, target = ends(item, work, HV)
            state = hv * K
            tma.store_wait(0)  # the copy engine has read ``so``; if no state was stored, nothing has waited for it yet
            barrier()  # all warps of the state group: none asks for a state earlier
        if work.cu_seqlens is None:
            row += n * T
        S = gl.zeros([64, K], gl.float32, WIDE_ROWS)
        if INITIAL:
            S = load_state(initial, source, state, v, so, sbar, K, V_FIRST, NO, WIDE_ROWS)
        offset = find_offset(checkpoints, n, length)
        for token in range(0, length, C):
            s, x = t % NS, t % NV
            sb = gl.convert_layout(S.to(ty), operand)
            mbarrier.wait(full.index(s), (t // NS) & 1)  # signalled by the copy engine: Qg, Kg, Kd, rates are there
            of_q, of_k, b = sr.index(s).slice(0, C, 1), sr.index(s).slice(C, C, 1), sr.index(s).slice(2 * C, C, 1)
            E = warpgroup_mma(sb, keys.Kg.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            O = warpgroup_mma(sb, keys.Qg.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            mbarrier.wait(vfull.index(x), (t // NV) & 1)  # signalled by the copy engine: v, A and P are there
            E, O = warpgroup_mma_wait(1, deps=[E, O])
            R = sv.index(x).permute([1, 0]).load(ROWS).to(gl.float32)
            if values.w is not None:
                R *= strengths_of(values.w.index(x).permute([1, 0]).load(ROWS), 1.0, RAW_BETA)
            R = (R - E * of_k.load(ROWS)) * b.load(ROWS)
            unit, inverse = units(R)
            R *= inverse
            A = values.A.index(x).permute([1, 0])
            U = warpgroup_mma(gl.convert_layout(R.to(gl.float16), operand), A, R, is_async=True)
            U, O = warpgroup_mma_wait(1, deps=[U, O])
            O *= of_q.load(ROWS)
            S *= keys.gamma.index(s).load(WIDE_ROWS)
            weight = of_k.load(ROWS)
            U = warpgroup_mma_wait(0, deps=[U]) * unit
            written = (U * weight).to(ty)
            read = U.to(ty)
            S = warpgroup_mma(gl.convert_layout(written, wide_operand), keys.Kd.index(s), S, is_async=True)
            P = values.P.index(x).permute([1, 0])
            O = warpgroup_mma(gl.convert_layout(read, operand), P, O, is_async=True)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            mbarrier.arrive(done.index(s), count=1)
            tma.store_wait(NO - 1)  # the copy engine has read the next buffer of ``so``
            barrier()  # all warps of the state group: none writes earlier
            out = so.index(t % NO)
            box, at = reinterpret(out, ty, [1, 1, C, 64], BOX), RAGGED - length + token
            store_through(out, box, o_desc, (RAGGED, row, at, hv * K + v), O.to(ty), True)
            t += 1
            if checkpoints.table is not None:
                slot = find_checkpoint(checkpoints, n, token + C, length, offset)
                if slot >= 0:
                    store_state(initial, S, slot, state, v, so, K, V_FIRST, NO)
        is_kept = True
        if work.prompts is not None:
            is_kept = target >= 0
        if is_kept:
            store_state(final, S, target, state, v, so, K, V_FIRST, NO)


@gluon.jit(
    do_not_specialize=["T", "items", "parted", "least", "most", "v_batch", "w_batch", "HV", *checkpoints.NUMBERS],
    do_not_specialize_on_alignment=checkpoints.POINTERS,
)
def scan_channels(
    qg_desc, kg_desc, kd_desc, r_desc, gamma_desc, v_desc, a_desc, p_desc, w_desc, o_desc, initial, final, cu_seqlens,
    forgets, prompts, checkpoints, offsets, T, items, parted, least, most, slots, null_slot, columns, interval,
    table_row, table_column, v_batch, w_batch, v_heads, w_heads, HV, INITIAL: gl.constexpr, V_FIRST: gl.constexpr,
    RAW_BETA: gl.constexpr, NS: gl.constexpr, NV: gl.constexpr, NO: gl.constexpr,
):  # fmt: skip
    """On a pool the launch works only if ``prompts`` has ``least`` to ``most`` sequences."""
    if prompts is not None:
        gdc_launch_dependents()  # `decode` may start: it needs nothing from this kernel, and runs where there is room
    checkpoints = Checkpoints(checkpoints, slots, null_slot, columns, interval, table_row, table_column, offsets)
    ty: gl.constexpr = v_desc.dtype
    sq = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sk = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sd = gl.allocate_shared_memory(ty, [NS, C, K], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [NS, 1, 4 * C], LINES)
    sg = gl.allocate_shared_memory(gl.float32, [NS, 1, K], LINES)
    sv = gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    sa = gl.allocate_shared_memory(gl.float16, [NV, C, C], TILE)
    sp = gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    so = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
    sw = None if w_desc is None else gl.allocate_shared_memory(ty, [NV, C, C], TILE)
    full, vfull, done, sbar = barriers(NS, 1), barriers(NV, 1), barriers(NS, 1), None
    if INITIAL:
        sbar = barriers(NO, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    if forgets is not None:
        items = gl.where(all_forget(forgets, parted), 0, items)
    keys, values = ChunkKeys(sq, sk, sd, sr, sg), ChunkValues(sv, sa, sp, sw)
    work = Work(cu_seqlens, T, items, prompts, least, most)
    of_keys = ChunkKeys(qg_desc, kg_desc, kd_desc, r_desc, gamma_desc)
    of_values, places = ChunkValues(v_desc, a_desc, p_desc, w_desc), (v_batch, w_batch, v_heads, w_heads)
    # The first role gets the registers that the others do not ask for.
    gl.warp_specialize([
        (state_role, (
            so, sbar, o_desc, initial, final, keys, values, full, vfull, done, checkpoints, work, HV, INITIAL, V_FIRST,
            RAW_BETA, NS,
        )),
        (load_prepared, (of_keys, keys, full, done, work, places, HV, True, NS)),
        (load_prepared, (of_values, values, vfull, done, work, places, HV, False, NS)),
    ], [1, 1], [24, 24])  # fmt: skip
    end_barriers((full, vfull, done), sbar)


def run_scan_channels(c: Draft, w: Prepared, o: Layout, final: Layout, forgets: Layout, parts: int = 1) -> None:
    """With several ``parts`` the kernel does nothing if gates forget, which ``forgets`` says."""
    p, initial = c.p, c.x.initial_state
    from_to = states(p, final if initial is None else initial), states(p, final)
    work = forgets, NO_LIST, checkpoints.NONE, p.N * p.HV * (parts - 1)
    _run(c, w, o, from_to, work, p.N, INITIAL=initial is not None)


def run_scan_prompts(c: Draft, w: Prepared, o: Layout, s: Slots, listed: Listed, sequences: int) -> None:
    """Scans prompts on a pool. ``sequences``: how many are scanned at the same time."""
    slots, work = pool(c.p, s.state_pool), (None, listed, checkpoint_values(c.p, s), 0)
    _run(c, w, o, (slots, slots), work, sequences, INITIAL=True)


def _run(
    c: Draft, w: Prepared, o: Layout, from_to: tuple[Descriptor, Descriptor], work: tuple, sequences: int, **own: bool
) -> None:  # fmt: skip
    """``from_to``: of first and final states. ``work``: `forget.py`'s numbers, the list of prompts, the arguments for
    checkpoints, and how many parts, without first ones, are scanned elsewhere if gates forget."""
    p, x = c.p, c.x
    forgets, listed, kept, parted = work
    arguments = (
        *(blocks(t, p.K) for t in (w.Qg, w.Kg, w.Kd)), lines(w.rates), lines(w.gamma, p.K),
        ragged(x.v, 64), squares(w.A), squares(w.P), ragged(x.w, 64), ragged(o, 64), *from_to,
        x.cu_seqlens, forgets, listed.prompts, *kept[:2], p.T, p.N * p.HV, parted, listed.least, listed.most, *kept[2:],
        *strides(x.v, x.w)[:2], x.v.stride(2), x.w and x.w.stride(2),
    )  # fmt: skip
    rings = CHANNEL_SCAN if x.w is None else CHANNEL_SCAN | {"NO": 1}  # the tiles of w take the place of one of o
    grid = min(sequences * p.HV, c.chip.processors), p.V // 64, 1
    launch_rule(c, scan_channels, arguments, grid, BY_HAND, follows=True, **own, **rings)
