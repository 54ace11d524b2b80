"""The forward pass for Hopper in one kernel. A program scans one state after the other, with a role per warp group.

    load     loads q, k and rates of a chunk into a ring of NS slots, and v into a ring of NV: one warp each
    rate     makes the rates instead, without a pool, norms and raw gates, if nothing is saved: one warp
    factor   writes A = (I + diag(b) L)^{-1} and P, from k k^T and q k^T, into a ring of NX slots. If there are
             two state groups, it writes only A, and each state group writes half of the columns of P
    state    R = b . (v - e^G . (k S0))     U = A R     S1 = gamma S0 + (e^{G_C - G} . k)^T U
             O = scale (e^G . (q S0) + P U)

Every state group holds 64 value columns of the state, transposed, S^T [64, K], in float32 accumulators. The values of
S, R and U go from registers into the next product. There are one or two state groups, and one or two factor groups.
Factor groups take chunks in turns. The docstring of rates.py says what the rates are.

Barriers, and who completes them:

    full     the copy engine, and the rate role if it makes rates: q, k and rates of a chunk are there
    vfull    the copy engine: v is there
    xfull    the factor group: A is there, and P if it writes P
    pfull    both state groups: their halves of P are there
    done     all state groups: they have read all tiles of a chunk, so that its slots are free

For the backward pass A also goes to memory, and with SAVE the state groups write S0 and U of every chunk.
inverse_tiles.py says how A is kept.

Two rules for ptxas. A wait for one accumulator has to name every other one that is still on its way. Otherwise ptxas
waits for all of them. And no role may need more registers than it has. Otherwise ptxas waits after every wgmma of the
kernel (C7512, see ``flash-delta-dev compile``).
"""

from collections.abc import Iterable

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from flash_delta.kernels.hopper.device import checkpoints
from flash_delta.kernels.hopper.device.checkpoints import Checkpoints, checkpoint_values, find_checkpoint, find_offset
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.hand_over import flag_of, hand_over, take_over
from flash_delta.kernels.hopper.device.inverse_tiles import fine, finished, halves, is_fine, tiles_in, times_inverse
from flash_delta.kernels.hopper.device.layouts import HALF, LINES, NARROW_ROWS, PAIRS, RAGGED, ROWS, TILE, C
from flash_delta.kernels.hopper.device.load_role import ChunkTiles, load_role
from flash_delta.kernels.hopper.device.rings import as_box, barriers, end_barriers, place_of, rate, sees
from flash_delta.kernels.hopper.device.segment_bounds import first_slot
from flash_delta.kernels.hopper.device.state_copies import apart_all, load_state, send, store_state, store_through
from flash_delta.kernels.hopper.device.work_items import Work, ends, enter, find_part, find_piece, find_pieces
from flash_delta.kernels.hopper.plans.boxes import (
    handed_by,
    inverses,
    lines,
    pool,
    ragged,
    row_strides,
    rows,
    saved,
    states,
)
from flash_delta.kernels.hopper.plans.tape import Tape, run_lay_tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, NARROW, LoopTile, count_programs, pool_loops
from flash_delta.kernels.hopper.scalar.forward.factor_role import factor_role
from flash_delta.kernels.hopper.scalar.forward.rate_role import rate_role
from flash_delta.kernels.hopper.scalar.segments.memory import PromptParts
from flash_delta.kernels.hopper.scalar.segments.roles import Barriers, StateDescriptors
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, tokens
from flash_delta.kernels.runtime.plan import Descriptor, Draft, Layout
from flash_delta.kernels.runtime.pool_launches import PoolLaunch
from flash_delta.kernels.runtime.workspace import Trace
from flash_delta.problem import Slots


@gluon.jit
def store_reads(reads, sp, to, of, j: gl.constexpr, ty: gl.constexpr, STEPS: gl.constexpr):
    """Stores 32 columns of P, from column j on."""
    row = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = j + gl.arange(0, C // 2, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    decay = gl.exp2(to.permute([1, 0]).load(NARROW_ROWS) - of.slice(j, C // 2, 1).load(NARROW_ROWS))
    sp.slice(j, C // 2, 1).store(gl.where(sees(row, column, STEPS), reads * decay, 0.0).to(ty))
    fence_async_shared()


@gluon.jit
def state_role(
    so, sbar, descs, tiles, bars, checkpoints, work, w, v: gl.constexpr, HV,
    INITIAL: gl.constexpr, V_FIRST: gl.constexpr, READS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Carries 64 value columns of the state, from column w + v on. ``descs``: `StateDescriptors`. ``tiles``:
    `ChunkTiles`. ``bars``: `Barriers`. ``checkpoints``: `Checkpoints`."""
    sq, sk, sv, sr, sa, sp = tiles.q, tiles.k, tiles.v, tiles.rates, tiles.A, tiles.P
    full, vfull, pfull, initial = bars.full, bars.v_full, bars.P_full, descs.initial
    T = work.T
    NS: gl.constexpr = sk.shape[0]
    NV: gl.constexpr = sv.shape[0]
    NX: gl.constexpr = sp.shape[0]
    WIDTH: gl.constexpr = sk.shape[2]
    FINE: gl.constexpr = sa.shape[0] == 3 * NX
    SAVE: gl.constexpr = descs.states is not None
    WIDE_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    PARTS: gl.constexpr = WIDTH // 64
    SENT: gl.constexpr = PARTS + 2 if SAVE else 1  # tiles of a chunk that go to memory through ``so``
    NO: gl.constexpr = so.shape[0]  # buffers
    BUFFERS: gl.constexpr = 1 if SAVE else NO  # for loads and stores of a whole state
    zero = gl.zeros([64, C], gl.float32, ROWS)
    t = 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        own = find_piece(piece, pieces, work, HV)
        n, hv, start, length, begin, end = own.n, own.hv, own.start, own.size, own.begin, own.end
        S = gl.zeros([64, WIDTH], gl.float32, WIDE_ROWS)
        if work.prompts is not None:
            first, last = ends(own.item, work, HV)
        stop = length
        if work.cuts is not None:
            starts, stop, before = find_part(own.item, work, HV, length)
            lost = 0.0
            if work.tape is not None and begin > starts:
                before = work.program - 1
                lost = take_over(flag_of(work, before, (w + v) // 64), work)
            if before >= 0:
                at = before * WIDTH
                S = load_state(descs.handed, None, at, w + v, so, sbar, WIDTH, True, BUFFERS, WIDE_ROWS) + lost
            else:
                S = load_state(initial, first, hv * WIDTH, w + v, so, sbar, WIDTH, V_FIRST, BUFFERS, WIDE_ROWS)
        elif work.tape is not None and begin > 0:
            lost = take_over(flag_of(work, work.program - 1, (w + v) // 64), work)
            before = (work.program - 1) * WIDTH
            S = load_state(descs.handed, None, before, w + v, so, sbar, WIDTH, True, BUFFERS, WIDE_ROWS) + lost
        elif work.prompts is not None:
            S = load_state(initial, first, hv * WIDTH, w + v, so, sbar, WIDTH, V_FIRST, BUFFERS, WIDE_ROWS)
        elif INITIAL:
            S = load_state(initial, None, own.item * WIDTH, w + v, so, sbar, WIDTH, V_FIRST, BUFFERS, WIDE_ROWS)
        row = start + length
        if work.cu_seqlens is None:
            row += n * T
        offset = find_offset(checkpoints, n, length)
        for token in range(begin, end, C):
            s, x = t % NS, t % NX
            sb = gl.convert_layout(S.to(ty), operand)
            # Signalled by the copy engine, and by the rate role if it makes rates: q, k and rates are there.
            mbarrier.wait(full.index(s), (t // NS) & 1)
            E = warpgroup_mma(sb, sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            O = warpgroup_mma(sb, sq.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            if SAVE:
                head = (first_slot(n, start, T, work.cu_seqlens is not None) + token // C) * HV + hv
                parts = apart_all(S.to(ty), PARTS)
                for m in gl.static_range(PARTS):
                    part = gl.convert_layout(parts[m], ROWS)
                    send(descs.states, part, head * WIDTH + w + v, 64 * m, so, t * SENT + m, NO, False)
            mbarrier.wait(vfull.index(t % NV), (t // NV) & 1)  # signalled by the copy engine: v is there
            E, O = warpgroup_mma_wait(0 if READS else 1, deps=[E, O])
            R = sv.index(t % NV).slice(v, 64, 1).permute([1, 0]).load(ROWS).to(gl.float32)
            R = R + E * rate(sr, s, 4).load(ROWS)
            R *= rate(sr, s, 3).load(ROWS)
            R, A, fine = halves(R.to(ty)), tiles_in(sa, x, FINE), is_fine(sr, s, FINE)
            mbarrier.wait(bars.A_full.index(x), (t // NX) & 1)  # signalled by the factor group: A, and P without READS
            U, U2 = times_inverse(R, A)
            U, U2, O = warpgroup_mma_wait(3, deps=[U, U2, O])
            O *= rate(sr, s, 5).load(ROWS)
            S *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE_ROWS)
            weight = rate(sr, s, 6).load(ROWS)
            U = finished(R, U, U2, A, fine)
            written = (U * weight).to(ty)
            read = U.to(ty)
            if READS:  # this group's half of q k^T: 32 keys
                keys = sk.index(s).slice(v // 2, C // 2, 0).permute([1, 0])
                reads = gl.zeros([C, C // 2], gl.float32, NARROW_ROWS)
                reads = warpgroup_mma(sq.index(s), keys, reads, use_acc=False, is_async=True)
            S = warpgroup_mma(gl.convert_layout(written, wide_operand), sk.index(s), S, is_async=True)
            if READS:
                reads, S = warpgroup_mma_wait(1, deps=[reads, S])
                store_reads(reads, sp.index(x), rate(sr, s, 0), rate(sr, s, 1), v // 2, ty, STEPS)
                mbarrier.arrive(pfull.index(x), count=1)
                mbarrier.wait(pfull.index(x), (t // NX) & 1)  # signalled by both state groups: P is whole
            O = warpgroup_mma(gl.convert_layout(read, operand), sp.index(x).permute([1, 0]), O, is_async=True)
            if SAVE:
                send(descs.U, read, head * C, w + v, so, t * SENT + PARTS, NO, True)
            O, S = warpgroup_mma_wait(0, deps=[O, S])
            tma.store_wait(NO - 1)  # the copy engine has read the next buffer of ``so``
            mbarrier.arrive(bars.done.index(s), count=1)
            out = so.index((t * SENT + SENT - 1) % NO)
            at = place_of(row, RAGGED - length + token, hv * WIDTH + w + v, STEPS)
            store_through(out, as_box(out, ty, 64, STEPS), descs.o, at, O.to(ty), True)
            t += 1
            if checkpoints.table is not None:
                slot = find_checkpoint(checkpoints, n, token + C, length, offset)
                if slot >= 0:
                    store_state(initial, S, slot, hv * WIDTH, w + v, so, WIDTH, V_FIRST, BUFFERS)
        if work.tape is not None and end < stop:
            store_state(descs.handed, S, None, work.program * WIDTH, w + v, so, WIDTH, True, BUFFERS)
            hand_over(flag_of(work, work.program, (w + v) // 64))
        elif work.prompts is not None:
            if last >= 0:
                store_state(descs.final, S, last, hv * WIDTH, w + v, so, WIDTH, V_FIRST, BUFFERS)
            else:
                tma.store_wait(0)  # the copy engine has read ``so``, where the next state will be loaded
                barrier()  # all warps of this group: none asks for that state earlier
        else:
            store_state(descs.final, S, None, own.item * WIDTH, w + v, so, WIDTH, V_FIRST, BUFFERS)


NUMBERS = [
    "items", "T", "least", "most", "q_batch", "k_batch", "v_batch", "g_batch", "beta_batch", "scale", "HV", "group",
    *checkpoints.NUMBERS,
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=[*checkpoints.POINTERS, *PER_TOKEN])
def forward_loop(
    q_desc, k_desc, v_desc, o_desc, r_desc, a_desc, s_desc, u_desc, initial, final, handed, tape, cu_seqlens,
    prompts, parts, checkpoints, offsets, items, T, least, most, slots, null_slot, columns, interval, table_row,
    table_column, q_batch, k_batch, v_batch, heads, g, beta, o, g_batch, beta_batch, g_token, g_head, beta_token,
    beta_head, scale, HV, group, WIDTH: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, SAVE: gl.constexpr,
    FINE: gl.constexpr, TAPED: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, FACTORS: gl.constexpr,
    NS: gl.constexpr, NV: gl.constexpr, NX: gl.constexpr, NO: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """``items``: the number of states. Item i is value head i % HV of sequence i // HV. With ``prompts`` and ``parts``
    (prompt_list.py) the device counts the sequences or their parts, and this launch works only if there are ``least``
    to ``most`` of them.
    K = V = WIDTH. Grid (programs, V / BV), BV = 64 GROUPS."""
    BV: gl.constexpr = 64 * GROUPS
    ty: gl.constexpr = q_desc.dtype
    block, program = gl.program_id(1), None
    if tape is not None:
        program, block = enter(tape)
    w = block * BV
    sq = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sk = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [2 * NS, 1, 4 * C], LINES)
    sv = gl.allocate_shared_memory(ty, [NV, C, BV], TILE)
    sa = gl.allocate_shared_memory(ty, [NX * (3 if FINE else 2), C, C // 2], HALF)
    sp = gl.allocate_shared_memory(ty, [NX, C, C], TILE)
    so = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
    sD = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], PAIRS)
    MAKES_RATES: gl.constexpr = r_desc is None
    full, done = barriers(NS, 2 if MAKES_RATES else 1), barriers(NS, GROUPS)
    vfull, xfull = barriers(NV, 1), barriers(NX, 1)
    pfull, sbar, sbar2 = None, None, None
    LOADS_STATES: gl.constexpr = INITIAL or tape is not None
    if LOADS_STATES:
        sbar = barriers(NO, 1)
    if prompts is not None:
        gdc_launch_dependents()  # `decode` may start: it needs nothing from this kernel, and runs where there is room
    checkpoints = Checkpoints(checkpoints, slots, null_slot, columns, interval, table_row, table_column, offsets)
    work = Work(cu_seqlens, T, items, prompts, least, most, parts, tape, program)
    of_keys, of_values = ChunkTiles(q_desc, k_desc, rates=r_desc), ChunkTiles(v=v_desc)
    batches, heads = ChunkTiles(q_batch, k_batch, v_batch), ChunkTiles(*heads)
    if GROUPS == 2:
        so2 = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
        pfull = barriers(NX, GROUPS)
        if LOADS_STATES:
            sbar2 = barriers(NO, 1)
    if FACTORS == 2:
        sD2 = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], PAIRS)
    tiles, bars = ChunkTiles(sq, sk, sv, sr, sa, sp), Barriers(full, vfull, xfull, pfull, done)
    descs = StateDescriptors(initial, final, handed, o_desc, s_desc, u_desc)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    gates = (g, beta, o, g_batch, (g_token, g_head), beta_batch, (beta_token, beta_head), scale)
    # The first role gets the registers that the others do not ask for.
    if GROUPS == 2:
        gl.warp_specialize([
            (factor_role, (sD, a_desc, tiles, bars, work, w, HV, 0, FACTORS, False, STEPS)),
            (state_role, (so, sbar, descs, tiles, bars, checkpoints, work, w, 0, HV, INITIAL, V_FIRST, True, STEPS)),
            (state_role, (so2, sbar2, descs, tiles, bars, checkpoints, work, w, 64, HV, INITIAL, V_FIRST, True, STEPS)),
            (load_role, (of_keys, tiles, batches, heads, group, full, done, work, HV, 0, None, None, STEPS)),
            (load_role, (of_values, tiles, batches, heads, group, vfull, done, work, HV, w)),
            (rate_role, (gates, tiles, full, done, work, HV, STEPS)),
        ], [4, 4, 1, 1, 1], [REGISTERS, REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (state_role, (so, sbar, descs, tiles, bars, checkpoints, work, w, 0, HV, INITIAL, V_FIRST, False, STEPS)),
            (factor_role, (sD, a_desc, tiles, bars, work, w, HV, 0, FACTORS, True, STEPS)),
            (factor_role, (sD2, a_desc, tiles, bars, work, w, HV, 1, FACTORS, True, STEPS)),
            (load_role, (of_keys, tiles, batches, heads, group, full, done, work, HV, 0, None, None, STEPS)),
            (load_role, (of_values, tiles, batches, heads, group, vfull, done, work, HV, w)),
            (rate_role, (gates, tiles, full, done, work, HV, STEPS)),
        ], [4, 4, 1, 1, 1], [REGISTERS, REGISTERS, 24, 24, 24])  # fmt: skip
    end_barriers((full, done, vfull, xfull), sbar, pfull, sbar2)


def run_pool_loops(
    c: Draft, o: Layout, rates: Layout, prompts: Layout, tape: Tape, parts: PromptParts | None, slots: Slots,
    final: Layout, *choice: LoopTile,
) -> None:  # fmt: skip
    """Launches the loop for sequences that the device lists, once for every tile that their number may select. States
    are read from ``slots.state_pool``, or are zeros, and written to ``final``: the same pool, or a slot for each
    sequence."""
    p, (starts, listed) = c.p, (0, None) if parts is None else (parts.starts, parts.listed)
    launches = pool_loops(p, c.chip, *choice, every=c.every, starts=starts)
    initial = pool(p, final if slots.state_pool is None else slots.state_pool)
    ends = initial, initial if slots.state_pool is final else pool(p, final)
    kept = checkpoints.NONE if p.pools is None else checkpoint_values(p, slots)
    taped = [(launch, None if launch.tile == NARROW else tape) for launch in launches]
    handed = None if parts is None else rows(tape.handed)
    _run(c, o, rates, taped, (*(None,) * 3, *ends), (prompts, listed, *kept), initial=True, handed=handed)


def run_loop(
    c: Draft, o: Layout, final: Layout, rates: Layout | None, A: Layout | None, *tiles: LoopTile,
    trace: Trace | None = None, tape: Tape | None = None,
) -> None:  # fmt: skip
    """Launches the loop with each of the ``tiles``. There is at most one program per multiprocessor and block of value
    columns. A program scans several states. Without ``rates`` the loop makes them. ``A`` and ``trace`` are written for
    the backward pass. The ``tape`` is laid first."""
    p, initial = c.p, c.x.initial_state
    if tape is not None:
        run_lay_tape(c, tape, follows=rates is not None)
    ends = states(p, final if initial is None else initial), states(p, final)
    stored = (None if A is None else inverses(A), *saved(trace), *ends)
    launches = [(PoolLaunch(t, p.N), tape) for t in tiles]
    _run(c, o, rates, launches, stored, (None, None, *checkpoints.NONE), initial=initial is not None)


def _run(
    c: Draft, o: Layout, rates: Layout | None, launches: Iterable[tuple[PoolLaunch, Tape | None]], stored: tuple,
    on_pool: tuple, *, initial: bool, handed: Descriptor | None = None,
) -> None:  # fmt: skip
    """``launches``: each with its tape. ``stored``: descriptors of A, of what is saved of chunks, and of the first and
    final states. ``on_pool``: the arguments for a pool: ``prompts``, ``parts``, ``checkpoints``, ``offsets``, and six
    numbers from ``slots`` on. ``handed``: of the states that parts start from, if there are parts."""
    p, x = c.p, c.x
    q, k, box = ragged(x.q, p.K, steps=p.steps), ragged(x.k, p.K), ragged(o, 64, steps=p.steps)
    lines_of = None if rates is None else lines(rates)
    gates = (x.g, x.beta, o) if rates is None else (None, None, None)
    numbers = *map(batch, gates[:2]), *tokens(gates[0]), *tokens(gates[1]), p.scale
    for (t, sequences, least, most, _), tape in launches:
        arguments = (
            q, k, ragged(x.v, 64 * t.groups), box, lines_of, *stored, *handed_by(tape, handed), x.cu_seqlens,
            *on_pool[:4], p.N * p.HV, p.T, least, most, *on_pool[4:], *row_strides(p, x.q, x.k, x.v), *gates, *numbers,
        )  # fmt: skip
        programs = count_programs(p, c.chip, t, sequences) if tape is None else tape.programs
        launch_rule(
            c, forward_loop, arguments, (programs, p.V // (64 * t.groups), 1), BY_HAND, INITIAL=initial,
            SAVE=stored[1] is not None, FINE=fine(p), TAPED=tape is not None, GROUPS=t.groups, FACTORS=t.factors,
            NS=t.slots, NV=t.values, NX=t.maps, NO=t.outputs, REGISTERS=t.registers, follows=rates is not None,
        )  # fmt: skip
