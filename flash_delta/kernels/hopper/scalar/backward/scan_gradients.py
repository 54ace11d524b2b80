"""All gradients of a chunk in one kernel, from right to left. There is a program per segment (or sequence) and value
head. Or programs share whole sequences (plans/tape.py), and the state's gradient goes from program to program.

    load        loads q, k and rates into a ring of two slots, and A, U, S0 and dO of a chunk: one warp
    state       P, L     dU = (e^{GC-G} . k) dS1 + P^T dO     dV = b . A^T dU
                dS0 = gamma dS1 + (scale e^G . q)^T dO - (e^G . k)^T dV
    gradient    dP = dO U^T     dq = scale e^G . (dO S0) + (dP D) k
                M = dV U^T      dk = (e^{GC-G} . U) dS1 - e^G . (dV S0) + (dP D)^T q - (M D)^T k - (M D) k

A = (I + diag(b) L)^{-1}, and the forward pass has saved it. D is the factor of q k^T in P, or of k k^T in L. Every
state group has 64 value columns of the state's gradient, transposed, dS^T [64, K], in float32 accumulators. There are
two state groups, or one for heads of 64. U, S0 and dO have one slot each. They are loaded during the last products of a
chunk.

What `finish` needs for the gradients of gates and b goes to memory as lines (memory.py). For a gate, these are sums of
only the terms on which this gate acts, so that nothing cancels (docs/mathematics.md section 4).

Without GRADIENTS there is no gradient role. Then the kernel computes the state's gradient at the start of every
segment, except a sequence's first, as if the gradient at the segment's end were zero. From this `compose_maps` makes
the gradient at the end of every segment. Such a scan begins at the first chunk from the right that has not decayed to
zero at the segment's start.

Barriers, and who completes them:

    kq_full, a_full, u_full, s_full, do_full    the copy engine: the tiles are there
    kq_free     all roles that compute: they have read q, k and rates
    a_free      the state groups: they have read A
    do_free     the state groups: they have read dO (the gradient role has read it before ``mid``)
    p_ready     the state groups: their columns of P are there, and with GRADIENTS those of L
    dv_ready    the state groups: dV is there, and they have read P
    mid         all roles that compute: they have read S0, U and dS
    g_done      the gradient role, or without it the state groups: P and L may be overwritten
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.hopper.device.gluon_compat import barrier, tma_load
from flash_delta.kernels.hopper.device.inverse_tiles import BYTES, fine, load_inverse, tiles_in
from flash_delta.kernels.hopper.device.layouts import HALF, TILE, C
from flash_delta.kernels.hopper.device.layouts import LINES as LINE
from flash_delta.kernels.hopper.device.load_role import ChunkTiles
from flash_delta.kernels.hopper.device.rings import barriers, end_barriers, load_box, load_rates
from flash_delta.kernels.hopper.device.segment_bounds import count_left, find_chunks, place
from flash_delta.kernels.hopper.device.work_items import Work, enter, find_pieces, find_run
from flash_delta.kernels.hopper.plans import boxes
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, FIND_ENDS, FINE_SCAN_GRADIENTS, SCAN_GRADIENTS
from flash_delta.kernels.hopper.scalar.backward.gradient_role import gradient_role
from flash_delta.kernels.hopper.scalar.backward.memory import BackBarriers, GradientLines, count_lines
from flash_delta.kernels.hopper.scalar.backward.state_role import state_role
from flash_delta.kernels.hopper.scalar.segments.memory import SegmentedScan
from flash_delta.kernels.hopper.scalar.segments.roles import StateDescriptors
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Trace
from flash_delta.problem import Inputs


@gluon.jit
def load_back(descs, tiles, bars, batches, heads, group, left, work, HV, STEPS: gl.constexpr):
    """Loads tiles. ``bars``: `BackBarriers`. The others are as in `load_role`."""
    sa, kq_full = tiles.A, bars.kq_full
    GRADIENTS: gl.constexpr = descs.S is not None
    WIDTH: gl.constexpr = tiles.k.shape[2]
    ROW: gl.constexpr = C * WIDTH * 2
    KEYS: gl.constexpr = 2 * ROW + 8 * C * 4
    STATE: gl.constexpr = WIDTH * WIDTH * 2
    pieces, earlier = find_pieces(work, HV), 0
    for piece in range(pieces.begin, pieces.end, pieces.step):
        hv, _, run = find_run(piece, pieces, work, HV, True)
        row, start, size, chunks = run.row, run.start, run.size, run.chunks
        h = hv // group
        if not GRADIENTS:
            chunks = gl.minimum(chunks, left)
        gdc_wait()  # the kernels before this one have ended, and their results can be read
        for t in range(earlier, earlier + chunks):
            c = earlier + chunks - 1 - t
            s, ph = t % 2, t & 1
            z = t >> (30 if work.length is None else 16)  # 0 (state_role.py)
            at, index = run.token + c * C, (run.chunk + c) * HV + hv
            # Signalled by all roles that compute: they have read q, k and rates.
            mbarrier.wait(bars.kq_free.index(s), ((t // 2) & 1) ^ 1)
            mbarrier.expect(kq_full.index(s), KEYS)
            k_row, q_row, full = row * batches.k + start, row * batches.q + start, kq_full.index(s)
            load_box(descs.k, k_row, size, at, h * heads.k, full, tiles.k.index(s), WIDTH)
            load_box(descs.q, q_row, size, at, h * heads.q, full, tiles.q.index(s), WIDTH, STEPS)
            load_rates(descs.rates, index, full, tiles.rates, s)
            mbarrier.wait(bars.a_free, ph ^ 1)  # signalled by the state groups: they have read A
            mbarrier.expect(bars.a_full, BYTES * sa.shape[0])
            load_inverse(descs.A, index, bars.a_full, tiles_in(sa, z, sa.shape[0] == 3), sa.shape[0] == 3)
            if GRADIENTS:
                mbarrier.wait(bars.mid, ph ^ 1)  # signalled by all roles that compute: they have read S0 and U
                mbarrier.expect(bars.s_full, STATE)
                tma_load(descs.S, [index * WIDTH, 0], bars.s_full, tiles.S.index(z))
                mbarrier.expect(bars.u_full, ROW)
                tma_load(descs.U, [index * C, 0], bars.u_full, tiles.U.index(z))
            mbarrier.wait(bars.do_free, ph ^ 1)  # signalled by the state groups: they have read dO
            mbarrier.expect(bars.do_full, ROW)
            do_row = row * batches.v + start
            load_box(descs.v, do_row, size, at, hv * heads.v, bars.do_full, tiles.v.index(z), WIDTH, STEPS)
        earlier += chunks


@gluon.jit(do_not_specialize=["length", "N", "T", "q_batch", "k_batch", "do_batch", "group", "HV"])
def scan_gradients(
    q_desc, k_desc, do_desc, a_desc, s_desc, u_desc, r_desc, dq_desc, dk_desc, dv_desc, after, start_desc, handed,
    tape, lines, rates, cu_seqlens, length, N, T, q_batch, k_batch, do_batch, heads, HV, group,
    WIDTH: gl.constexpr, ENDS: gl.constexpr, V_FIRST: gl.constexpr, GATE: gl.constexpr,
    GRADIENTS: gl.constexpr, LINES: gl.constexpr, FINE: gl.constexpr, TAPED: gl.constexpr, STEPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``after``: the gradient of the states at the ends of segments with ENDS, otherwise at the ends of sequences.
    Grid (slots of segments * HV,), or with a tape (programs,)."""
    gdc_launch_dependents()
    GROUPS: gl.constexpr = WIDTH // 64
    READERS: gl.constexpr = GROUPS + 1 if GRADIENTS else GROUPS
    ty: gl.constexpr = k_desc.dtype
    sq = gl.allocate_shared_memory(ty, [2, C, WIDTH], TILE)
    sk = gl.allocate_shared_memory(ty, [2, C, WIDTH], TILE)
    sdo = gl.allocate_shared_memory(ty, [1, C, WIDTH], TILE)
    sa = gl.allocate_shared_memory(ty, [3 if FINE else 2, C, C // 2], HALF)
    sds = gl.allocate_shared_memory(ty, [GROUPS, 64, WIDTH], TILE)
    sp = gl.allocate_shared_memory(ty, [1, C, C], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [4, 1, 4 * C], LINE)
    ss, su, sdv, sl, so = sds, sdo, sdo, sp, sdo  # without GRADIENTS nobody uses these
    if GRADIENTS:
        ss = gl.allocate_shared_memory(ty, [1, WIDTH, WIDTH], TILE)
        su = gl.allocate_shared_memory(ty, [1, C, WIDTH], TILE)
        sdv = gl.allocate_shared_memory(ty, [GROUPS, C, 64], TILE)
        sl = gl.allocate_shared_memory(ty, [1, C, C], TILE)
        so = gl.allocate_shared_memory(ty, [1, C, WIDTH], TILE)
    kq_full, kq_free = barriers(2, 1), barriers(2, READERS)
    full, by_states, mid = barriers(4, 1), barriers(4, GROUPS), barriers(1, READERS)
    g_done = barriers(1, 1 if GRADIENTS else GROUPS)
    sbar, sbar2 = None, None
    if after is not None or tape is not None:
        sbar = barriers(GROUPS, 1)
        if GROUPS == 2:
            sbar2 = barriers(GROUPS, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    tiles = ChunkTiles(sq, sk, sdo, sr, sa, sp, None, ss, su, sds, sdv, sl)
    bars = BackBarriers(
        kq_full, kq_free, full.index(0), full.index(1), full.index(2), full.index(3), by_states.index(0),
        by_states.index(1), by_states.index(2), by_states.index(3), mid.index(0), g_done.index(0),
    )  # fmt: skip
    work = Work(cu_seqlens, T, N, length=length)
    if tape is not None:
        program, _ = enter(tape)
        work = Work(cu_seqlens, T, N * HV, tape=tape, program=program)
    descs = ChunkTiles(q_desc, k_desc, do_desc, r_desc, a_desc, S=s_desc, U=u_desc)
    batches, heads = ChunkTiles(q_batch, k_batch, do_batch), ChunkTiles(*heads)
    left = gl.program_id(0) * 0
    if not GRADIENTS:
        gdc_wait()  # `rates` has ended, and its results can be read
        run = find_chunks(work, HV)
        if run.number > 0:
            left = count_left(rates, run, place(HV)[1], HV, False)
    states = StateDescriptors(after, start_desc, handed)
    # The first role gets the registers that the others do not ask for.
    if GRADIENTS and GROUPS == 2:
        gl.warp_specialize([
            (gradient_role, (dq_desc, dk_desc, tiles, bars, so, lines, work, HV, GATE, LINES, STEPS)),
            (state_role, (
                sbar, dv_desc, states, tiles, bars, lines, left, work, HV, 0, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (state_role, (
                sbar2, dv_desc, states, tiles, bars, lines, left, work, HV, 1, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (load_back, (descs, tiles, bars, batches, heads, group, left, work, HV, STEPS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    elif GRADIENTS:
        gl.warp_specialize([
            (gradient_role, (dq_desc, dk_desc, tiles, bars, so, lines, work, HV, GATE, LINES, STEPS)),
            (state_role, (
                sbar, dv_desc, states, tiles, bars, lines, left, work, HV, 0, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (load_back, (descs, tiles, bars, batches, heads, group, left, work, HV, STEPS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (state_role, (
                sbar, dv_desc, states, tiles, bars, lines, left, work, HV, 0, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (state_role, (
                sbar2, dv_desc, states, tiles, bars, lines, left, work, HV, 1, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (load_back, (descs, tiles, bars, batches, heads, group, left, work, HV, STEPS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (state_role, (
                sbar, dv_desc, states, tiles, bars, lines, left, work, HV, 0, ENDS, V_FIRST, GATE, LINES, STEPS,
            )),
            (load_back, (descs, tiles, bars, batches, heads, group, left, work, HV, STEPS)),
        ], [1], [24])  # fmt: skip
    end_barriers((kq_full, kq_free, full, by_states, mid, g_done), sbar, sbar2)


def run_scan_gradients(
    c: Draft, rates: Layout, w: SegmentedScan, trace: Trace, do: Layout, after: Layout | None, ends: Layout | None,
    parts: GradientLines, d: Inputs, tape: Tape | None = None,
) -> None:  # fmt: skip
    """Launches `scan_gradients` for all gradients. ``after``: the gradient of the final states. ``ends``: the gradient
    of the states at the ends of segments, or None if sequences are not split."""
    p, K = c.p, c.p.K
    saved = boxes.blocks(trace.states, K, K), boxes.blocks(trace.U, K)
    gradients = boxes.ragged(parts.dq, K, steps=p.steps), boxes.ragged(parts.dk, K), boxes.ragged(d.v, 64)
    state = None if after is None else boxes.states(p, after)
    if ends is not None:
        state = boxes.rows(ends)
    start = None if d.initial_state is None else boxes.states(p, d.initial_state)
    given = (*saved, *gradients, state, start, *boxes.handed_by(tape), parts.lines)
    registers = (FINE_SCAN_GRADIENTS if fine(p) else SCAN_GRADIENTS)[K]
    _run(c, rates, w, do, given, tape, ENDS=ends is not None, GRADIENTS=True, **registers)


def run_find_ends(c: Draft, rates: Layout, w: SegmentedScan, do: Layout, after: Layout | None, D: Layout) -> None:
    """Launches `scan_gradients` for ``D``, the gradient of the state at the start of every segment except the first.
    For it the gradient at the segment's end is taken as zero, or in the last segment as ``after``."""
    state = None if after is None else boxes.states(c.p, after)
    given = (None,) * 5 + (state, boxes.rows(D), None, None, D)
    _run(c, rates, w, do, given, None, ENDS=False, GRADIENTS=False, **FIND_ENDS[c.p.K])


def _run(
    c: Draft, rates: Layout, w: SegmentedScan, do: Layout, given: tuple, tape: Tape | None, **constants: int
) -> None:
    """``given``: descriptors of S0, U, dq, dk, dv, and of the states' gradients at the end and at the start; what
    programs hand over, and the table of the ``tape``; lines."""
    p, x = c.p, c.x
    q, k = boxes.ragged(x.q, p.K, steps=p.steps), boxes.ragged(x.k, p.K)
    out = boxes.ragged(do, p.K, steps=p.steps)
    arguments = (
        q, k, out, boxes.inverses(w.A), *given[:2], boxes.lines(rates), *given[2:], rates, x.cu_seqlens, w.length,
        p.N, p.T, *boxes.row_strides(p, x.q, x.k, do),
    )  # fmt: skip
    programs = count_slots(p, w.length) * p.HV if tape is None else tape.programs
    launch_rule(
        c, scan_gradients, arguments, (programs, 1, 1), BY_HAND, LINES=count_lines(p.V), FINE=fine(p),
        TAPED=tape is not None, follows=True, **constants,
    )  # fmt: skip
