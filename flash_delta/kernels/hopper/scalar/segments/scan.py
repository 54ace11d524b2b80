"""Scans all segments at the same time, with A from factor.py, from the states that `compose_maps` has written
(maps.py).

    load     loads q, k, rates, A and v of a chunk into a ring of NS slots: one warp
    score    writes P into a ring of two slots
    state    R = b . (v - e^G . (k S0))     U = A R     S1 = gamma S0 + (e^{G_C - G} . k)^T U
             O = scale (e^G . (q S0) + P U)

There are two state groups with 64 columns of the transposed state each, as in the loop, or one for heads of 64. The
grid is (slots * HV,). Heads of 256 have one state group and a program for every 64 columns, and the grid is
(slots * HV, V / 64). They scan whole sequences, from their initial states.

Each slot of the rings has a barrier of these kinds:

    full     the copy engine completes it when all tiles of a chunk have arrived
    pfull    the score group completes it when P is ready
    done     all state groups complete it when they have read all tiles of a chunk, so that its slots are free

With SAVE the state groups also write S0 of every chunk and U to memory, as in the loop. The backward pass computes S0
and U again with this kernel (`run_retrace`). Then there is neither q nor O, and no score group. There programs may also
share whole sequences (plans/tape.py). Nothing is saved of heads of 256.
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

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.hand_over import flag_of, hand_over, take_over
from flash_delta.kernels.hopper.device.inverse_tiles import fine, finished, halves, is_fine, tiles_in, times_inverse
from flash_delta.kernels.hopper.device.layouts import HALF as NARROW
from flash_delta.kernels.hopper.device.layouts import LINES, RAGGED, ROWS, TILE, C
from flash_delta.kernels.hopper.device.load_role import ChunkTiles, load_role
from flash_delta.kernels.hopper.device.rings import as_box, barriers, end_barriers, place_of, rate, sees, wait_free
from flash_delta.kernels.hopper.device.segment_bounds import find_chunks
from flash_delta.kernels.hopper.device.state_copies import apart_all, load_state, send, store_state, store_through
from flash_delta.kernels.hopper.device.work_items import Work, enter, find_pieces, find_run
from flash_delta.kernels.hopper.plans.boxes import handed_by, inverses, lines, ragged, row_strides, rows, saved, states
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, RETRACE, SEGMENT_SCANS
from flash_delta.kernels.hopper.scalar.segments.memory import HALF, SegmentedScan
from flash_delta.kernels.hopper.scalar.segments.roles import Barriers, StateDescriptors
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.plan import Descriptor, Draft, Layout
from flash_delta.kernels.runtime.workspace import Trace


@gluon.jit
def score_role(tiles, bars, work, HV, STEPS: gl.constexpr):
    """Writes P. ``tiles``: `ChunkTiles`. ``bars``: `Barriers`."""
    sq, sk, sr, sp = tiles.q, tiles.k, tiles.rates, tiles.P
    NS: gl.constexpr = sk.shape[0]
    SCORES: gl.constexpr = sp.shape[0]
    i = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, ROWS))[None, :]
    zero = gl.zeros([C, C], gl.float32, ROWS)
    for t in range(find_chunks(work, HV).chunks):
        s, x = t % NS, t % SCORES
        mbarrier.wait(bars.full.index(s), (t // NS) & 1)  # signalled by the copy engine: q, k and rates arrived
        P = warpgroup_mma(sq.index(s), sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
        decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))
        P = warpgroup_mma_wait(0, deps=[P])
        P = gl.where(sees(i, j, STEPS), P * decay, 0.0).to(sk.dtype)
        wait_free(bars.done, t, SCORES, NS)  # signalled by the state groups, which have read the old P
        sp.index(x).store(P)
        fence_async_shared()
        mbarrier.arrive(bars.P_full.index(x), count=1)


@gluon.jit
def state_role(
    sv, so, sbar, sb, descs, tiles, bars, work, v, HV, INITIAL: gl.constexpr, START_V_FIRST: gl.constexpr,
    V_FIRST: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Carries 64 value columns of the state, from column v on. ``sv``: their ring of v. ``descs``: `StateDescriptors`,
    whose initial states are those of segments. ``tiles``: `ChunkTiles`. ``bars``: `Barriers`."""
    sq, sk, sr, sa, sp, full = tiles.q, tiles.k, tiles.rates, tiles.A, tiles.P, bars.full
    starts = descs.initial
    NS: gl.constexpr = sk.shape[0]
    WIDTH: gl.constexpr = sk.shape[2]
    FINE: gl.constexpr = sa.shape[0] == 3 * NS
    SAVE: gl.constexpr = descs.states is not None
    STAGED: gl.constexpr = WIDTH > 128  # registers do not suffice for S and for S as an operand
    WIDE_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([64, C], gl.float32, ROWS)
    READS: gl.constexpr = descs.o is not None
    PARTS: gl.constexpr = WIDTH // 64
    SENT: gl.constexpr = PARTS + 1 + READS if SAVE else 1  # tiles of a chunk that go to memory through ``so``
    NO: gl.constexpr = so.shape[0]  # number of buffers
    SCORES: gl.constexpr = sp.shape[0] if READS else 1
    pieces, earlier = find_pieces(work, HV), 0
    for piece in range(pieces.begin, pieces.end, pieces.step):
        hv, slot, run = find_run(piece, pieces, work, HV)
        size, chunks, last = run.size, run.chunks, run.last
        row = run.row * work.T + run.start + size
        gdc_wait()  # earlier kernels have ended: ``starts`` can be read, and this kernel's outputs can be written
        if (chunks > 0) | last:
            S = gl.zeros([64, WIDTH], gl.float32, WIDE_ROWS)
            if work.tape is not None and run.number > 0:
                lost = take_over(flag_of(work, work.program - 1, v // 64), work)
                left_at = (work.program - 1) * WIDTH
                S = load_state(descs.handed, None, left_at, v, so, sbar, WIDTH, True, 1, WIDE_ROWS) + lost
            elif INITIAL:
                S = load_state(starts, None, (slot * HV + hv) * WIDTH, v, so, sbar, WIDTH, START_V_FIRST, 1, WIDE_ROWS)
            for step in range(chunks):
                t = earlier + step
                s, x = t % NS, t % SCORES
                if STAGED:
                    sb.store(S.to(ty))
                    fence_async_shared()
                    barrier()  # all warps of this state group: S is whole in shared memory
                    before = sb
                else:
                    before = gl.convert_layout(S.to(ty), operand)
                mbarrier.wait(full.index(s), (t // NS) & 1)  # signalled by the copy engine: the chunk's tiles arrived
                E = warpgroup_mma(before, sk.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
                if STAGED:
                    E = warpgroup_mma_wait(0, deps=[E])
                else:
                    if READS:
                        O = warpgroup_mma(before, sq.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
                    if SAVE:
                        parts = apart_all(S.to(ty), PARTS)
                        for m in gl.static_range(PARTS):
                            part = gl.convert_layout(parts[m], ROWS)
                            at = ((run.chunk + step) * HV + hv) * WIDTH + v
                            send(descs.states, part, at, 64 * m, so, t * SENT + m, NO, False)
                    if READS:
                        E, O = warpgroup_mma_wait(0, deps=[E, O])
                    else:
                        E = warpgroup_mma_wait(0, deps=[E])
                R = sv.index(s).permute([1, 0]).load(ROWS).to(gl.float32)
                R = R + E * rate(sr, s, 4).load(ROWS)
                R *= rate(sr, s, 3).load(ROWS)
                R, A, fine = halves(R.to(ty)), tiles_in(sa, s, FINE), is_fine(sr, s, FINE)
                U, U2 = times_inverse(R, A)
                if STAGED:
                    O = warpgroup_mma(before, sq.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
                elif READS:
                    O *= rate(sr, s, 5).load(ROWS)
                S *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE_ROWS)
                if STAGED:
                    U, U2, O = warpgroup_mma_wait(0, deps=[U, U2, O])
                U = finished(R, U, U2, A, fine)
                written = (U * rate(sr, s, 6).load(ROWS)).to(ty)
                read = U.to(ty)
                S = warpgroup_mma(gl.convert_layout(written, wide_operand), sk.index(s), S, is_async=True)
                if STAGED:
                    O *= rate(sr, s, 5).load(ROWS)
                if READS:
                    mbarrier.wait(bars.P_full.index(x), (t // SCORES) & 1)  # signalled by the score group: P is ready
                    O = warpgroup_mma(gl.convert_layout(read, operand), sp.index(x).permute([1, 0]), O, is_async=True)
                if SAVE:
                    send(descs.U, read, ((run.chunk + step) * HV + hv) * C, v, so, t * SENT + PARTS, NO, True)
                if READS:
                    O, S = warpgroup_mma_wait(0, deps=[O, S])
                else:
                    S = warpgroup_mma_wait(0, deps=[S])
                mbarrier.arrive(bars.done.index(s), count=1)
                if READS:
                    tma.store_wait(NO - 1)  # the copy engine has read the next buffer of ``so``
                    barrier()  # all warps of this state group: none writes earlier
                    out = so.index((t * SENT + SENT - 1) % NO)
                    left = RAGGED - size + run.token + step * C
                    at = place_of(row, left, hv * WIDTH + v, STEPS)
                    store_through(out, as_box(out, ty, 64, STEPS), descs.o, at, O.to(ty), True)
            if work.tape is not None and not last:
                store_state(descs.handed, S, None, work.program * WIDTH, v, so, WIDTH, True, 1)
                hand_over(flag_of(work, work.program, v // 64))
            elif last and descs.final is not None:
                store_state(descs.final, S, None, (run.n * HV + hv) * WIDTH, v, so, WIDTH, V_FIRST, 1)
            tma.store_wait(0)
            if work.tape is not None:
                barrier()  # all warps of this group: none asks earlier for the state that is loaded next
        earlier += chunks


NUMBERS = ["length", "N", "T", "q_batch", "k_batch", "v_batch", "group", "HV"]


@gluon.jit(do_not_specialize=NUMBERS)
def scan_segments(
    q_desc, k_desc, v_desc, r_desc, a_desc, o_desc, s_desc, u_desc, starts, final, handed, tape, cu_seqlens, length, N,
    T, q_batch, k_batch, v_batch, heads, HV, group, WIDTH: gl.constexpr, GROUPS: gl.constexpr, INITIAL: gl.constexpr,
    START_V_FIRST: gl.constexpr, V_FIRST: gl.constexpr, SAVE: gl.constexpr, FINE: gl.constexpr, TAPED: gl.constexpr,
    STEPS: gl.constexpr, NS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    LOADS_STATES: gl.constexpr = INITIAL or tape is not None
    ty: gl.constexpr = k_desc.dtype
    sq, sp = None, None
    if q_desc is not None:
        sq = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
        SCORES: gl.constexpr = 1 if (SAVE and FINE) or WIDTH > 128 else 2  # slots of the ring of P
        sp = gl.allocate_shared_memory(ty, [SCORES, C, C], TILE)
    sk = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sv = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [2 * NS, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [NS * (3 if FINE else 2), C, C // 2], NARROW)
    NO: gl.constexpr = 2 if SAVE else 1
    so = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
    full, done = barriers(NS, 1), barriers(NS, GROUPS)
    pfull, sbar, sbar2 = None, None, None
    if q_desc is not None:
        pfull = barriers(SCORES, 1)
    if LOADS_STATES:
        sbar = barriers(1, 1)
    sb, sv2 = so, None
    if WIDTH > 128:
        sb = gl.allocate_shared_memory(ty, [64, WIDTH], TILE)
    if GROUPS == 2:
        sv2 = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
        so2 = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
        if LOADS_STATES:
            sbar2 = barriers(1, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    work = Work(cu_seqlens, T, N, length=length)
    if tape is not None:
        program, _ = enter(tape)
        work = Work(cu_seqlens, T, N * HV, tape=tape, program=program)
    batches, heads = ChunkTiles(q_batch, k_batch, v_batch), ChunkTiles(*heads)
    descs = ChunkTiles(q_desc, k_desc, v_desc, r_desc, a_desc)
    tiles, bars = ChunkTiles(sq, sk, sv, sr, sa, sp, sv2), Barriers(full, None, None, pfull, done)
    states = StateDescriptors(starts, final, handed, o_desc, s_desc, u_desc)
    first = gl.program_id(0) * 0  # a number and no constant, so that both groups are compiled as one function
    second = first + 64
    if GROUPS == 2 and q_desc is None:
        gl.warp_specialize([
            (state_role, (
                sv, so, sbar, sb, states, tiles, bars, work, first, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (state_role, (
                sv2, so2, sbar2, sb, states, tiles, bars, work, second, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, 0, None, None, STEPS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (score_role, (tiles, bars, work, HV, STEPS)),
            (state_role, (
                sv, so, sbar, sb, states, tiles, bars, work, first, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (state_role, (
                sv2, so2, sbar2, sb, states, tiles, bars, work, second, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, 0, None, None, STEPS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    elif q_desc is None:
        gl.warp_specialize([
            (state_role, (
                sv, so, sbar, sb, states, tiles, bars, work, first, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, 0, None, None, STEPS)),
        ], [1], [24])  # fmt: skip
    else:
        first = gl.program_id(1) * 64
        gl.warp_specialize([
            (score_role, (tiles, bars, work, HV, STEPS)),
            (state_role, (
                sv, so, sbar, sb, states, tiles, bars, work, first, HV, INITIAL, START_V_FIRST, V_FIRST, STEPS,
            )),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, first, None, None, STEPS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    end_barriers((full, done), pfull, sbar, sbar2)


def run_scan_segments(c: Draft, o: Layout, final: Layout, rates: Layout, w: SegmentedScan, trace: Trace | None) -> None:
    p = c.p
    ends = ragged(c.x.q, p.K, steps=p.steps), ragged(o, HALF, steps=p.steps), states(p, final)
    _run(c, rates, w, trace, *ends, None, **SEGMENT_SCANS[p.K])


def run_retrace(c: Draft, rates: Layout, w: SegmentedScan, trace: Trace, tape: Tape | None = None) -> None:
    """Computes the states and U of chunks again, for the backward pass."""
    _run(c, rates, w, trace, None, None, None, tape, **RETRACE)


def _run(
    c: Draft, rates: Layout, w: SegmentedScan, trace: Trace | None, q: Descriptor | None, o: Descriptor | None,
    final: Descriptor | None, tape: Tape | None, **constants: int,
) -> None:  # fmt: skip
    p, x = c.p, c.x
    groups = 2 if p.K == 128 else 1
    starts = final if w.starts is None else rows(w.starts)
    if w.starts is None and x.initial_state is not None:
        starts = states(p, x.initial_state)
    arguments = (
        q, ragged(x.k, p.K), ragged(x.v, HALF), lines(rates), inverses(w.A), o, *saved(trace), starts, final,
        *handed_by(tape), x.cu_seqlens, w.length, p.N, p.T, *row_strides(p, x.q, x.k, x.v),
    )  # fmt: skip
    programs = count_slots(p, w.length) * p.HV if tape is None else tape.programs
    launch_rule(
        c, scan_segments, arguments, (programs, p.V // (HALF * groups), 1), BY_HAND, GROUPS=groups,
        INITIAL=w.starts is not None or x.initial_state is not None,
        START_V_FIRST=w.starts is not None or p.state_v_first, SAVE=trace is not None, FINE=fine(p),
        TAPED=tape is not None, follows=True, **constants,
    )  # fmt: skip
