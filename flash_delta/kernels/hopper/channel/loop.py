"""The forward pass with a decay per channel in one kernel. A program scans one state after the other, 32 tokens at a
time, with a role per warp group.

    load     loads q, k and g (and b) into a ring of NR slots, and v (and w) into one of NV: one warp each
    gate     makes rows and columns of them, into a ring of NX slots (gate_role.py)
    factor   makes A and P of rows and columns, into the same slots (factor_role.py)
    state    E = (2^n S0) k~    R = b (v - r_k E)    U = A R + R    S1 = d . (2^n S0 + k^^T (r_k U))
             O = scale r_q ((2^n S0) q~) + P U

k~ and q~ are the rows, and k^ are the columns. With a strength per channel k~ has b . k, and R is w . v - r_k E. A is
float16 (units.py) and lacks its diagonal (prepare.py). d is ``trail``, the decay from the point where decays are taken
apart to the end of the 32 tokens. If 32 tokens fall too far, they come in several pieces (gate_role.py). The outputs of
a piece are 0 for tokens of other pieces, so the outputs of all pieces are added up.

One state group holds the state, transposed, S^T [V, K], in float32 accumulators. If a program has a whole state, these
are two halves [64, K], and the group scans one half after the other. The rules for ptxas
in scalar/forward/loop.py hold here, too.

Barriers, and who completes them:

    gfull    the copy engine: g is there
    full     the copy engine: q, k and b are there
    vfull    the copy engine: v and w are there
    left     the gate group: it has read q, k, g and b
    tiled    the gate group: rows, columns, norms, b and decays are there
    ready    the factor group: A and P are there, too
    done     the state group: it has read all that is in a slot of the ring of NX
    vdone    the state group: it has read v and w for the last piece of 32 tokens. Without pieces this is ``done``
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

from flash_delta.kernels.hopper.channel.factor_role import factor_role
from flash_delta.kernels.hopper.channel.forget import all_forget
from flash_delta.kernels.hopper.channel.gate_role import gate_role, is_last
from flash_delta.kernels.hopper.channel.gates import strengths_of
from flash_delta.kernels.hopper.channel.load_roles import clear_role, load_keys, load_values
from flash_delta.kernels.hopper.channel.parts import STEP, find_part
from flash_delta.kernels.hopper.channel.prepare import LINE
from flash_delta.kernels.hopper.channel.roles import (
    Barriers,
    Described,
    GateParameters,
    Places,
    StateBuffers,
    StepFactors,
    Tiles,
)
from flash_delta.kernels.hopper.channel.scan import WIDE_ROWS
from flash_delta.kernels.hopper.channel.scores import K
from flash_delta.kernels.hopper.device.checkpoints import Checkpoints, find_checkpoint, find_offset
from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_store
from flash_delta.kernels.hopper.device.hand_over import flag_of, hand_over, take_over
from flash_delta.kernels.hopper.device.layouts import (
    BOX,
    FLAGS,
    FLOATS,
    HALF,
    LINES,
    NARROW_ROWS,
    PAIRS,
    RAGGED,
    ROWS,
    TILE,
    C,
)
from flash_delta.kernels.hopper.device.rings import barriers, end_barriers
from flash_delta.kernels.hopper.device.state_copies import apart, ask_for_state, load_state, store_state, take_state
from flash_delta.kernels.hopper.device.units import units
from flash_delta.kernels.hopper.device.work_items import Work, ends, enter, find_pieces
from flash_delta.kernels.hopper.plans.boxes import handed_by, ragged, states, strides
from flash_delta.kernels.hopper.plans.tape import Tape, run_lay_tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, ChannelTile, channel_rings
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout

OUTPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [64, 64]


@gluon.jit
def halves(scores):
    """The first 32 columns, and the others."""
    left, right = apart(scores)
    return gl.convert_layout(left, NARROW_ROWS), gl.convert_layout(right, NARROW_ROWS)


@gluon.jit
def add_up(whole, piece):
    """Adds the outputs of a piece to those before. Of every two numbers one is 0."""
    whole.store(whole.load(OUTPUTS) + piece.load(OUTPUTS))
    fence_async_shared()
    barrier()  # all warps of the state group: the sums are there


@gluon.jit
def load_halves(desc, slot, row, v, buffers, S, S2, HALVES: gl.constexpr, V_FIRST: gl.constexpr):
    """The state that `load_state` loads, its value columns from v on; with two HALVES also the second half."""
    NO: gl.constexpr = buffers.so.shape[0]
    so, sbar, so2, sbar2 = buffers
    ask_for_state(desc, slot, row, v, so, sbar, K, V_FIRST, NO)
    if so2 is not None:
        ask_for_state(desc, slot, row, 64, so2, sbar2, K, V_FIRST, NO)
    S = take_state(desc, slot, row, v, so, sbar, K, V_FIRST, NO, WIDE_ROWS)
    if so2 is not None:
        S2 = take_state(desc, slot, row, 64, so2, sbar2, K, V_FIRST, NO, WIDE_ROWS)
    elif HALVES == 2:
        S2 = load_state(desc, slot, row, 64, so, sbar, K, V_FIRST, NO, WIDE_ROWS)
    return S, S2


@gluon.jit
def store_halves(desc, slot, row, v, so, S, S2, HALVES: gl.constexpr, V_FIRST: gl.constexpr):
    """Stores a state where `load_halves` loads it."""
    NO: gl.constexpr = so.shape[0]
    store_state(desc, S, slot, row, v, so, K, V_FIRST, NO)
    if HALVES == 2:
        store_state(desc, S2, slot, row, 64, so, K, V_FIRST, NO)


@gluon.jit
def state_role(
    buffers, descs, sv, sw, made, bars, checkpoints, work, block, HV, INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr, BOUNDED: gl.constexpr, RAW_BETA: gl.constexpr,
):  # fmt: skip
    """Carries the state. ``sv``, ``sw``: the rings of v and w. ``made``: `StepFactors`. ``checkpoints``:
    `Checkpoints`."""
    so = buffers.so
    operand: gl.constexpr = gl.DotOperandLayout(0, NARROW_ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = made.rows.dtype
    NX: gl.constexpr = made.rows.shape[0]
    NV: gl.constexpr = sv.shape[0]
    HALVES: gl.constexpr = sv.shape[2] // 64
    NO: gl.constexpr = so.shape[0]  # buffers
    zero = gl.zeros([64, 2 * STEP], gl.float32, ROWS)
    v, step, t = block * 64 * HALVES, 0, 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        part = find_part(piece, pieces, work, HV)
        n, hv, length, token, begin, end = part.n, part.hv, part.size, part.first, part.begin, part.end
        row, state = part.start + length, part.item * K
        source, target = None, None
        if work.prompts is not None:
            source, target = ends(part.item, work, HV)
            state = hv * K
            tma.store_wait(0)  # the copy engine has read ``so``; if no state was stored, nothing has waited for it yet
            barrier()  # all warps of the state group: none asks for a state earlier
        if work.cu_seqlens is None:
            row += n * work.T
        S, S2 = gl.zeros([64, K], gl.float32, WIDE_ROWS), gl.zeros([64, K], gl.float32, WIDE_ROWS)
        if work.tape is not None:  # noqa: SIM102 (a constant)
            if begin > 0:
                lost = take_over(flag_of(work, work.program - 1, block), work)
                S, S2 = load_halves(descs.handed, None, (work.program - 1) * K, v, buffers, S, S2, HALVES, True)
                S, S2 = S + lost, S2 + lost
        begins, is_end = True, True
        if work.parts is not None:
            begins = piece % work.parts == 0
            is_end = (begins | (begin < end)) & (end == length)
        if work.tape is not None:
            begins, is_end = begin == 0, end == length
        if INITIAL:  # noqa: SIM102 (a constant)
            if begins:
                S, S2 = load_halves(descs.initial, source, state, v, buffers, S, S2, HALVES, V_FIRST)
        offset, fresh = find_offset(checkpoints, n, length, STEP), length >= 0
        while token < end:
            if BOUNDED:
                step = t
            x, y = t % NX, step % NV
            of_k, of_q = made.norms.index(x).slice(0, STEP, 1), made.norms.index(x).slice(STEP, STEP, 1)
            b = made.strengths.index(x).slice(0, STEP, 1)
            A = made.maps.index(x).slice(0, STEP, 0)
            # The factor group has stored the bits of P.
            P = reinterpret(made.maps.index(x), ty, [2 * STEP, STEP], HALF).slice(STEP, STEP, 0)
            at = RAGGED - length + token
            if work.parts is not None:
                at = gl.where(token < begin, RAGGED, at)  # outputs before the part are clipped
            mbarrier.wait(bars.ready.index(x), (t // NX) & 1)  # signalled by the factor group: A and P are there
            mbarrier.wait(bars.v_full.index(y), (step // NV) & 1)  # signalled by the copy engine: v is there
            last, buffer = True, step
            if not BOUNDED:
                last = is_last(made.flags.index(x))
                if not fresh:
                    buffer += 1
                    tma.store_wait(0)  # the copy engine has read all buffers of ``so``
            tma.store_wait(HALVES * (NO - 1))  # the copy engine has read the next buffer of ``so``
            out = reinterpret(so.index(buffer % NO), ty, [2, STEP, 64], TILE)
            barrier()  # all warps of the state group: none writes earlier
            for half in gl.static_range(HALVES):
                S *= made.lead.index(x).load(WIDE_ROWS)
                sb = gl.convert_layout(S.to(ty), wide_operand)
                EO = warpgroup_mma(sb, made.rows.index(x).permute([1, 0]), zero, use_acc=False, is_async=True)
                EO = warpgroup_mma_wait(0, deps=[EO])
                E, O = halves(EO)
                R = sv.index(y).slice(64 * half, 64, 1).permute([1, 0]).load(NARROW_ROWS).to(gl.float32)
                if sw is not None:
                    z = sw.index(y).slice(64 * half, 64, 1).permute([1, 0]).load(NARROW_ROWS)
                    R *= strengths_of(z, 1.0, RAW_BETA)
                weight = of_k.load(NARROW_ROWS)
                R = (R - E * weight) * b.load(NARROW_ROWS)
                unit, inverse = units(R)
                R *= inverse
                U = warpgroup_mma(gl.convert_layout(R.to(gl.float16), operand), A.permute([1, 0]), R, is_async=True)
                O *= of_q.load(NARROW_ROWS)
                U = warpgroup_mma_wait(0, deps=[U]) * unit
                written, read = (U * weight).to(ty), U.to(ty)
                S = warpgroup_mma(gl.convert_layout(written, wide_operand), made.columns.index(x), S, is_async=True)
                O = warpgroup_mma(gl.convert_layout(read, operand), P.permute([1, 0]), O, is_async=True)
                O, S = warpgroup_mma_wait(0, deps=[O, S])
                S *= made.trail.index(x).load(WIDE_ROWS)
                out.index(half).permute([1, 0]).store(O.to(ty))
                if HALVES == 2:
                    S, S2 = S2, S
            fence_async_shared()
            mbarrier.arrive(bars.done.index(x), count=1)
            barrier()  # all warps of the state group: the buffer is full
            if not BOUNDED:  # noqa: SIM102 (the outer condition is a constant)
                if not fresh:
                    add_up(so.index(step % NO), so.index(buffer % NO))
            if last:
                out = reinterpret(so.index(step % NO), ty, [2, STEP, 64], TILE)
                for half in gl.static_range(HALVES):
                    box = reinterpret(out.index(half), ty, [1, 1, STEP, 64], BOX)
                    tma_store(descs.o, [RAGGED, row, at, hv * K + v + 64 * half], box)
                token += STEP
                if not BOUNDED:
                    mbarrier.arrive(bars.v_done.index(y), count=1)
                    step += 1
                if checkpoints.table is not None:
                    slot = find_checkpoint(checkpoints, n, token, length, offset)
                    if slot >= 0:
                        store_halves(descs.initial, slot, state, v, so, S, S2, HALVES, V_FIRST)
            if not BOUNDED:
                fresh = last
            t += 1
        if work.tape is not None:  # noqa: SIM102 (a constant)
            if not is_end:
                store_halves(descs.handed, None, work.program * K, v, so, S, S2, HALVES, True)
                hand_over(flag_of(work, work.program, block))
        if work.prompts is not None:
            is_end = is_end & (target >= 0)
        if is_end:
            store_halves(descs.final, target, state, v, so, S, S2, HALVES, V_FIRST)


@gluon.jit
def run_roles(
    descs, checkpoints, work, tape, forgets, o, gate, places, HV, INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr, NORM: gl.constexpr, RAW_BETA: gl.constexpr, RAW_GATE: gl.constexpr,
    BOUNDED: gl.constexpr, NR: gl.constexpr, NV: gl.constexpr, NX: gl.constexpr, NO: gl.constexpr,
    HALVES: gl.constexpr, GATES: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Divides a program's shared memory, and starts its roles. ``descs``: `Described`. ``checkpoints``: `Checkpoints`.
    ``gate``: `GateParameters`."""
    ty: gl.constexpr = descs.q.dtype
    sq = gl.allocate_shared_memory(ty, [NR, STEP, K], TILE)
    sk = gl.allocate_shared_memory(ty, [NR, STEP, K], TILE)
    wide: gl.constexpr = descs.g.dtype == gl.float32
    sg = gl.allocate_shared_memory(descs.g.dtype, [NR, STEP, K], FLOATS if wide else TILE)
    sv = gl.allocate_shared_memory(ty, [NV, STEP, 64 * HALVES], TILE)
    sb, sw = None, None
    if descs.b is not None:
        sb = gl.allocate_shared_memory(ty, [NR, STEP, K], TILE)
        sw = gl.allocate_shared_memory(ty, [NV, STEP, 64 * HALVES], TILE)
    rows = gl.allocate_shared_memory(ty, [NX, 2 * STEP, K], TILE)
    columns = gl.allocate_shared_memory(ty, [NX, STEP, K], TILE)
    maps = gl.allocate_shared_memory(gl.float16, [NX, 2 * STEP, STEP], HALF)
    norms = gl.allocate_shared_memory(gl.float32, [NX, 1, 2 * STEP], LINES)
    strengths = gl.allocate_shared_memory(gl.float32, [NX, 1, 2 * STEP], LINES)
    lead = gl.allocate_shared_memory(gl.float32, [NX, 1, K], LINES)
    trail = gl.allocate_shared_memory(gl.float32, [NX, 1, K], LINES)
    totals = gl.allocate_shared_memory(gl.float32, [2, K], LINE)
    sD = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], PAIRS)
    so = gl.allocate_shared_memory(ty, [NO, C, C], TILE)
    gfull, full, left, vfull = barriers(NR, 1), barriers(NR, 1), barriers(NR, 1), barriers(NV, 1)
    ready, done, tiled = barriers(NX, 1), barriers(NX, 1), barriers(NX, 1)
    vdone, flags, so2, sbar, sbar2 = done, None, None, None, None
    if INITIAL or tape is not None:
        sbar = barriers(NO, 1)
        if HALVES == 2 and (descs.b is None or not wide):  # otherwise there is no memory left
            so2, sbar2 = gl.allocate_shared_memory(ty, [NO, C, C], TILE), barriers(NO, 1)
    if not BOUNDED:
        vdone, flags = barriers(NV, 1), gl.allocate_shared_memory(gl.int32, [NX, 1], FLAGS)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    block, program = gl.program_id(1), None
    if tape is not None:
        program, block = enter(tape)
    items = work.items
    if forgets is not None:
        items = gl.where(all_forget(forgets, items - items // work.parts), items, 0)
    T, prompts, parts = work.T, work.prompts, work.parts
    work = Work(work.cu_seqlens, T, items, prompts, work.least, work.most, None, tape, program, parts)
    given, made = Tiles(sq, sk, sg, sb), StepFactors(rows, columns, maps, norms, strengths, lead, trail, flags)
    bars = Barriers(gfull, full, left, vfull, vdone, tiled, ready, done)
    buffers = StateBuffers(so, sbar, so2, sbar2)
    # The first role gets the registers that the others do not ask for.
    gl.warp_specialize([
        (state_role, (
            buffers, descs, sv, sw, made, bars, checkpoints, work, block, HV, INITIAL, V_FIRST, BOUNDED, RAW_BETA,
        )),
        (gate_role, (totals, given, made, bars, gate, work, HV, NORM, RAW_GATE, BOUNDED, RAW_BETA)),
        (factor_role, (sD, made, bars, work, HV, BOUNDED)),
        (load_keys, (descs, given, bars, places, work, HV)),
        (load_values, (descs, sv, sw, bars, places, block, work, NX if BOUNDED else NV, HV)),
        (clear_role, (o, work, HV)),
    ], [4, 4, 1, 1, 1], [GATES, FACTORS, 24, 24, 24])  # fmt: skip
    end_barriers((gfull, full, left, vfull, ready, done, tiled), sbar, sbar2, None if BOUNDED else vdone)


NUMBERS = [
    "T", "parts", "items", "q_batch", "k_batch", "v_batch", "g_batch", "b_batch", "w_batch", "beta_batch", "HV", "group"
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=PER_TOKEN)
def channel_loop(
    q_desc, k_desc, v_desc, g_desc, b_desc, w_desc, o_desc, initial, final, handed, tape, cu_seqlens, o, beta, A_log,
    dt_bias, forgets, T, parts, items, q_batch, k_batch, v_batch, g_batch, b_batch, w_batch, heads, scale, bound,
    beta_top, beta_batch, beta_token, beta_head, HV, group, INITIAL: gl.constexpr, V_FIRST: gl.constexpr,
    NORM: gl.constexpr, RAW_BETA: gl.constexpr, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr, NR: gl.constexpr,
    NV: gl.constexpr, NX: gl.constexpr, NO: gl.constexpr, HALVES: gl.constexpr, GATES: gl.constexpr,
    FACTORS: gl.constexpr, PARTED: gl.constexpr, TAPED: gl.constexpr,
):  # fmt: skip
    """``items``: the number of states. Item i is value head i % HV of sequence i // HV. If PARTED, ``items`` counts the
    parts of all states, ``parts`` of each, and there is no work unless gates forget (forget.py)."""
    descs = Described(q_desc, k_desc, v_desc, g_desc, b_desc, w_desc, o_desc, initial, final, handed)
    work = Work(cu_seqlens, T, items, parts=parts if PARTED else None)
    forgets = forgets if PARTED else None
    gate = GateParameters(A_log, dt_bias, bound, scale, beta, beta_batch, (beta_token, beta_head), beta_top)
    places = Places(q_batch, k_batch, g_batch, v_batch, b_batch, w_batch, group, *heads)
    run_roles(
        descs, Checkpoints(), work, tape, forgets, o, gate, places, HV, INITIAL, V_FIRST, NORM, RAW_BETA, RAW_GATE,
        BOUNDED, NR, NV, NX, NO, HALVES, GATES, FACTORS,
    )  # fmt: skip


def run_channel_loop(
    c: Draft, o: Layout, final: Layout, t: ChannelTile, forgets: Layout | None = None, parts: int = 1,
    tape: Tape | None = None,
) -> None:  # fmt: skip
    """Launches `channel_loop`. With ``forgets`` sequences have several ``parts``, and the kernel works only if gates
    forget. With a ``tape`` sequences have no parts, and the tape is laid first."""
    p, x, initial = c.p, c.x, c.x.initial_state
    if tape is not None:
        run_lay_tape(c, tape, follows=False)
    q_batch, k_batch, g_batch, v_batch, b_batch, w_batch, heads = strides(x.q, x.k, x.g, x.v, x.b, x.w)
    widths = p.K, p.K, 64 * t.HALVES, p.K, p.K, 64 * t.HALVES, 64
    arguments = (
        *(ragged(y, width, STEP.value) for y, width in zip((x.q, x.k, x.v, x.g, x.b, x.w, o), widths, strict=True)),
        states(p, final if initial is None else initial), states(p, final), *handed_by(tape),
        x.cu_seqlens, o, x.beta, x.A_log, x.dt_bias,
        forgets, p.T, parts, p.N * p.HV * parts, q_batch, k_batch, v_batch, g_batch, b_batch, w_batch, heads,
        p.scale, p.gate.bound or 0.0, p.beta_range, batch(x.beta), *tokens(x.beta),
    )  # fmt: skip
    own = channel_rings(p) | t._asdict() | {"PARTED": forgets is not None, "TAPED": tape is not None}
    grid = min(p.N * p.HV * parts, c.chip.processors), 2 // t.HALVES, 1
    launch_rule(c, channel_loop, arguments, grid, BY_HAND, INITIAL=initial is not None, **own)
