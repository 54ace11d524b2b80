"""Computes the map of every segment, S_end = Phi S + B, and from these maps the state that every segment starts from.

`find_maps` needs A (factor.py). Its roles:

    load     loads k, rates and A of a chunk, and v if the map is B, into a ring of NS slots: one warp
    state    R = b . (v - e^G . (k S0))     U = A R     S1 = gamma S0 + (e^{G_C - G} . k)^T U

A program computes either Phi or B of a segment. For Phi it scans the identity, without values. For B it scans zero,
with values. In a sequence's first segment, B starts from the initial state instead, and is then the state at the end.
So the first segment needs no Phi, and the last one needs no map. There are two state groups with 64 columns each, or
one for heads of 64.

Chunks whose effect has decayed to zero at the end of a segment are not scanned. The sums of gates show this beforehand:
B begins where chunks start to matter, and if some do not matter, Phi is zero. Also, once Phi is zero it stays zero, so
its program ends, with the same bits as if it went on. Programs of Phi are launched first, so that programs of B take
the place of those that end early.

`compose_maps` multiplies numbers that are the sum of two bfloat16 each, and leaves out the smallest of the four
products. Its error is 2^-16. The scan itself rounds to 2^-9.
"""

import triton
import triton.language as tl
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

from flash_delta.kernels.device.chunk import bounds, count_slots, follow, lead
from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret
from flash_delta.kernels.hopper.device.inverse_tiles import fine, finished, halves, is_fine, tiles_in, times_inverse
from flash_delta.kernels.hopper.device.layouts import FLAGS, LINES, ROWS, THREADS, TILE, C
from flash_delta.kernels.hopper.device.layouts import HALF as NARROW
from flash_delta.kernels.hopper.device.load_role import ChunkTiles, load_role
from flash_delta.kernels.hopper.device.rings import barriers, end_barriers, rate
from flash_delta.kernels.hopper.device.segment_bounds import count_left, find_map, is_Phi, place, without_faded
from flash_delta.kernels.hopper.device.state_copies import apart_all, load_state, send, store_state
from flash_delta.kernels.hopper.device.work_items import Work
from flash_delta.kernels.hopper.plans.boxes import inverses, lines, pool, ragged, rows, squares, states, strides
from flash_delta.kernels.hopper.plans.tape import Tape
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, MAPS, compose_tile
from flash_delta.kernels.hopper.scalar.segments.cut import MOST_PARTS
from flash_delta.kernels.hopper.scalar.segments.factor import run_factor_chunks
from flash_delta.kernels.hopper.scalar.segments.memory import HALF, PromptParts, SegmentedScan
from flash_delta.kernels.runtime import arguments
from flash_delta.kernels.runtime.plan import Descriptor, Draft, Layout
from flash_delta.kernels.triton.forward.scan import load_state as load_rows
from flash_delta.kernels.triton.forward.scan import store_state as store_rows
from flash_delta.problem import Slots

PART = gl.constexpr(8)  # after so many chunks a state group checks whether Phi is zero
NEVER = gl.constexpr(2**30)


@gluon.jit
def map_role(sv, so, sbar, initial, B, Phi, tiles, full, done, flags, lasting, work, v, HV, V_FIRST: gl.constexpr):
    """Scans 64 columns of a map, from column v on. ``sv``: their ring of v. ``tiles``: `ChunkTiles`. ``lasting``: how
    many chunks have not decayed at the segment's end."""
    sk, sr, sa = tiles.k, tiles.rates, tiles.A
    NS: gl.constexpr = sk.shape[0]
    WIDTH: gl.constexpr = sk.shape[2]
    FINE: gl.constexpr = sa.shape[0] == 3 * NS
    WIDE_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([64, C], gl.float32, ROWS)
    run, keys = find_map(work, HV), is_Phi()
    n, needed, skipped = run.n, run.chunks > 0, gl.maximum(run.chunks - lasting, 0)
    chunks = without_faded(run, lasting).chunks
    index = gl.program_id(0)  # slot * HV + value head
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_ROWS))[:, None]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE_ROWS))[None, :]
    kept = (skipped == 0) & (keys > 0)  # Phi starts as the identity, or as zero if chunks have decayed; B as zero
    S = gl.where((i + v + gl.where(kept, 0, WIDTH)) == c, 1.0, 0.0) + gl.zeros([64, WIDTH], gl.float32, WIDE_ROWS)
    if sbar is not None and ((run.number == 0) & (keys == 0) & (skipped == 0)):
        if work.cuts is None:
            head = (n * HV + place(HV)[1]) * WIDTH
            S = load_state(initial, None, head, v, so, sbar, WIDTH, V_FIRST, 1, WIDE_ROWS)
        else:
            source, head = gl.load(work.prompts + 3 * n + 2), place(HV)[1] * WIDTH
            S = load_state(initial, source, head, v, so, sbar, WIDTH, V_FIRST, 1, WIDE_ROWS)
    mbarrier.wait(full.index(0), 0, pred=chunks > 0)  # signalled by the copy engine: the first chunk arrived
    sb = gl.convert_layout(S.to(ty), operand)
    E = warpgroup_mma(sb, sk.index(0).permute([1, 0]), zero, use_acc=False, is_async=True)
    E = warpgroup_mma_wait(0, deps=[E])
    begin, going = chunks * 0, chunks > 0
    while going:
        end = gl.minimum(begin + PART, chunks)
        for t in range(begin, end):
            s, later = t % NS, (t + 1) % NS
            R = E * rate(sr, s, 4).load(ROWS)
            if keys == 0:
                R += sv.index(s).permute([1, 0]).load(ROWS).to(gl.float32)
            R *= rate(sr, s, 3).load(ROWS)
            R, A, fine = halves(R.to(ty)), tiles_in(sa, s, FINE), is_fine(sr, s, FINE)
            U, U2 = times_inverse(R, A)
            S *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE_ROWS)
            U = finished(R, U, U2, A, fine)
            U = (U * rate(sr, s, 6).load(ROWS)).to(ty)
            S = warpgroup_mma(gl.convert_layout(U, wide_operand), sk.index(s), S, is_async=True)
            S = warpgroup_mma_wait(0, deps=[S])
            mbarrier.arrive(done.index(s), count=1)
            # Starts the next chunk. After the last chunk E comes from old tiles, and is not used.
            sb = gl.convert_layout(S.to(ty), operand)
            # Signalled by the copy engine: the next chunk has arrived.
            mbarrier.wait(full.index(later), ((t + 1) // NS) & 1, pred=t + 1 < chunks)
            E = warpgroup_mma(sb, sk.index(later).permute([1, 0]), zero, use_acc=False, is_async=True)
            E = warpgroup_mma_wait(0, deps=[E])
        begin = end
        left = gl.max(gl.max(gl.maximum(S, -S), 1), 0)
        going = (end < chunks) & ((keys == 0) | (left > 0))
    if begin < chunks:
        leave(flags, v // 64, full, done, begin, chunks, NS)
    if needed:
        if keys == 0:
            if work.cuts is not None:  # it becomes the start of the next part
                part = gl.load(work.cuts + 5 * place(HV)[0] + 5) + 1
                index = gl.load(work.cuts + 5 * part + 4) + place(HV)[1]
            store_state(B, S, None, index * WIDTH, v, so, WIDTH, True, 1)
        else:
            store_parts(Phi, S, index * 2 * WIDTH + v, so, WIDTH)


@gluon.jit
def leave(flags, which, full, done, t, chunks, NS: gl.constexpr):
    """A state group whose part of Phi is zero reports this, and then frees all later chunks without reading them. When
    both groups have reported it, the load role ends, and says at which chunk."""
    flags.index(which).store(gl.full([32], 1, gl.int32, THREADS))
    going = t < chunks
    while going:
        # Signalled by the copy engine: the chunk has arrived. At the end by the load role, without a load.
        mbarrier.wait(full.index(t % NS), (t // NS) & 1)
        end = gl.max(flags.index(2).load(THREADS), 0)
        mbarrier.arrive(done.index(t % NS), count=1)
        t += 1
        going = (t < chunks) & (t <= end)


@gluon.jit
def store_parts(desc, S, row, so, WIDTH: gl.constexpr):
    """Stores S as the sum of two bfloat16: WIDTH rows of the larger parts, then WIDTH rows of the smaller parts."""
    high = S.to(gl.bfloat16)
    low = (S - high.to(gl.float32)).to(gl.bfloat16)
    COUNT: gl.constexpr = WIDTH // 64
    parts = apart_all(high, COUNT) + apart_all(low, COUNT)
    tiles = reinterpret(so, gl.bfloat16, [1, 64, 64], TILE)
    for m in gl.static_range(2 * COUNT):
        part = gl.convert_layout(parts[m], ROWS)
        send(desc, part, row + m // COUNT * WIDTH, m % COUNT * 64, tiles, m, 1, False)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "N", "T", "k_batch", "v_batch", "group", "HV"])
def find_maps(
    k_desc, v_desc, r_desc, a_desc, initial, B, Phi, rates, cu_seqlens, prompts, parts, length, N, T, k_batch,
    v_batch, heads, HV, group, WIDTH: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, FINE: gl.constexpr,
    NS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (slots of segments * HV, 2). With ``prompts`` and ``parts`` (plans/prompt_list.py) it is (starts * HV, 2),
    and ``initial`` is the pool."""
    GROUPS: gl.constexpr = WIDTH // 64
    gdc_launch_dependents()
    first = gl.program_id(0) * 0  # a number and no constant, so that both groups are one function
    if parts is not None:
        gdc_wait()  # the kernel that makes the lists has ended
        if gl.program_id(0) >= gl.load(parts) * HV:
            return
    work = Work(cu_seqlens, T, N, prompts, cuts=parts, length=length)
    run = find_map(work, HV)
    gdc_wait()  # `rates` has ended, so a kernel that waits for this one also waits for earlier kernels
    if run.chunks == 0:  # a sequence of one segment needs no map
        return
    left = count_left(rates, run, place(HV)[1], HV, True)
    ty: gl.constexpr = k_desc.dtype
    sk = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sv = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [2 * NS, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [NS * (3 if FINE else 2), C, C // 2], NARROW)
    so, sv2 = gl.allocate_shared_memory(ty, [1, C, C], TILE), None
    if GROUPS == 2:
        sv2 = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
        so2, second = gl.allocate_shared_memory(ty, [1, C, C], TILE), first + 64
    full, done = barriers(NS, 1), barriers(NS, GROUPS)
    sbar, sbar2 = None, None
    if INITIAL:
        sbar = barriers(1, 1)
        if GROUPS == 2:
            sbar2 = barriers(1, 1)
    flags = gl.allocate_shared_memory(gl.int32, [3, 32], FLAGS)  # per group: Phi is zero; the chunk where loads end
    flags.index(0).store(gl.full([32], 0, gl.int32, THREADS))
    flags.index(1).store(gl.full([32], 2 - GROUPS, gl.int32, THREADS))  # 1 if there is no second group
    flags.index(2).store(gl.full([32], NEVER, gl.int32, THREADS))
    fence_async_shared()
    barrier()  # all warps of the program: the barriers are initialised, and the flags set
    descs, tiles = ChunkTiles(None, k_desc, v_desc, r_desc, a_desc), ChunkTiles(None, sk, sv, sr, sa, v2=sv2)
    batches, heads = ChunkTiles(k=k_batch, v=v_batch), ChunkTiles(None, *heads)
    if GROUPS == 2:
        gl.warp_specialize([
            (map_role, (sv, so, sbar, initial, B, Phi, tiles, full, done, flags, left, work, first, HV, V_FIRST)),
            (map_role, (sv2, so2, sbar2, initial, B, Phi, tiles, full, done, flags, left, work, second, HV, V_FIRST)),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, 0, flags, left)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (map_role, (sv, so, sbar, initial, B, Phi, tiles, full, done, flags, left, work, first, HV, V_FIRST)),
            (load_role, (descs, tiles, batches, heads, group, full, done, work, HV, 0, flags, left)),
        ], [1], [24])  # fmt: skip
    end_barriers((full, done), sbar, sbar2)


@triton.jit(do_not_specialize=["N", "T", "length", "HV"])
def compose_maps(
    B, Phi, starts, cu_seqlens, initial_state, N, T, length, initial_strides, HV, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr, BACK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes ``starts [slots, HV, V, K]`` from B [slots, HV, V, K] and Phi [slots, HV, 2, K, K]. Grid (V / BV, HV,
    N).

    BACK: right to left, by the transposes of Phi. ``initial_state`` is then the gradient at the end of the last
    segment, and ``starts`` are the gradients that come into every segment from the right."""
    lead(OVERLAP)
    d, hv, n = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, K)
    start, stop, slot = bounds(n, cu_seqlens, N, T, length, PACKED)
    segments = (stop - start + length - 1) // length
    strides, square = (HV.to(tl.int64) * V * K, V * K, 1, K), c[:, None] * K + c[None, :]
    step = 1
    if BACK:
        slot, step, square = slot + tl.maximum(segments - 1, 0), -1, c[:, None] + c[None, :] * K
    S = tl.zeros([BV, K], tl.float32)
    if INITIAL:
        S = load_rows(initial_state, initial_strides, n, hv, d, c, V, K)
    follow(OVERLAP)
    store_rows(starts, strides, S, slot, hv, d, c, V, K)
    S = load_rows(B, strides, slot, hv, d, c, V, K, segments > 1)
    store_rows(starts, strides, S, slot + step, hv, d, c, V, K, segments > 1)
    B_ahead = load_rows(B, strides, slot + step, hv, d, c, V, K, segments > 2)
    for number in range(1, segments - 1):
        S = apply_map(Phi + ((slot + step * number).to(tl.int64) * HV + hv) * (2 * K * K) + square, S, B_ahead, K)
        B_ahead = load_rows(B, strides, slot + step * (number + 1), hv, d, c, V, K, number + 2 < segments)
        store_rows(starts, strides, S, slot + step * (number + 1), hv, d, c, V, K)


@triton.jit
def apply_map(Phi, S, B, K: tl.constexpr):
    """Phi S + B. ``Phi``: the addresses of its larger parts."""
    Phi_high, Phi_low = tl.load(Phi), tl.load(Phi + K * K)
    high = S.to(tl.bfloat16)
    low = (S - high.to(tl.float32)).to(tl.bfloat16)
    small = tl.dot(low, Phi_high) + tl.dot(high, Phi_low)  # apart from S: in one sum, products wait for each other
    return tl.dot(high, Phi_high, B) + small


@triton.jit(do_not_specialize=["before", "HV"])
def compose_starts(
    handed, Phi, prompts, parts, pool, before, pool_strides, HV, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes the starts of prompts in parts (plans/prompt_list.py), as `compose_maps` does for segments. They are
    in ``handed``, after ``before`` other states. `find_maps` has left B of a part where the start of the next part
    goes. A prompt's first start is the state in its slot. Grid (V / BV, HV, prompts that may be cut)."""
    lead(OVERLAP)
    d, hv, c = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.arange(0, K)
    strides, square = (HV.to(tl.int64) * V * K, V * K, 1, K), c[:, None] * K + c[None, :]
    follow(OVERLAP)
    if tl.program_id(2) >= tl.load(parts + 1):
        return
    s = tl.load(parts + 5 * tl.program_id(2) + 6)
    part = tl.load(parts + 5 * s + 5)
    at, slot = part + tl.arange(0, MOST), tl.load(prompts + 3 * part + 2)
    n = tl.load(prompts + 3 * at + 1, mask=at < tl.load(prompts), other=-1)
    number = tl.sum((n == tl.load(prompts + 3 * part + 1)).to(tl.int32), 0)  # of the prompt's parts
    S = load_rows(pool, pool_strides, slot, hv, d, c, V, K, slot >= 0)
    store_rows(handed, strides, S, s, before + hv, d, c, V, K)
    S = load_rows(handed, strides, s + 1, before + hv, d, c, V, K)
    B = load_rows(handed, strides, s + 2, before + hv, d, c, V, K, number > 2)
    for i in range(1, number - 1):
        S = apply_map(Phi + ((s + i).to(tl.int64) * HV + hv) * (2 * K * K) + square, S, B, K)
        B = load_rows(handed, strides, s + i + 2, before + hv, d, c, V, K, i + 2 < number)
        store_rows(handed, strides, S, s + i + 1, before + hv, d, c, V, K)


def run_find_maps(c: Draft, rates: Layout, w: SegmentedScan) -> None:
    initial, started = (w.B, False) if c.x.initial_state is None else (c.x.initial_state, True)
    slots, given = count_slots(c.p, w.length), (states(c.p, initial), rows(w.B))
    _find_maps(c, rates, w, given, (None, None, w.length), slots, INITIAL=started)


def run_find_starts(
    c: Draft, rates: Layout, prompts: Layout, tape: Tape, w: PromptParts, slots: Slots, final: Layout
) -> None:
    """Finds the state that every part of a prompt starts from. ``slots``, ``final``: as `run_pool_loops` takes them."""
    p, lists = c.p, (prompts, w.listed)
    states = final if slots.state_pool is None else slots.state_pool
    given = pool(p, states), rows(tape.handed)
    run_factor_chunks(c, rates, w)
    _find_maps(c, rates, w, given, (*lists, 0), w.starts, INITIAL=True)
    t = compose_tile(p, c.chip)
    pointers, grid = (tape.handed, w.Phi, *lists, states), (p.V // t.BV, p.HV, w.prompts)
    numbers = tape.programs, arguments.states(p, states)
    arguments.launch_rule(c, compose_starts, pointers, grid, t, *numbers, MOST=MOST_PARTS, follows=True)


def _find_maps(
    c: Draft, rates: Layout, w: SegmentedScan | PromptParts, given: tuple[Descriptor, Descriptor], listed: tuple,
    count: int, **own: bool,
) -> None:  # fmt: skip
    """``given``: of the first states, and of where B goes. ``listed``: two lists of prompts, or the tokens of a
    segment. ``count``: of segments."""
    p, x = c.p, c.x
    values = (
        ragged(x.k, p.K), ragged(x.v, HALF), lines(rates), inverses(w.A), *given, squares(w.Phi), rates, x.cu_seqlens,
        *listed, p.N, p.T, *strides(x.k, x.v),
    )  # fmt: skip
    arguments.launch_rule(
        c, find_maps, values, (count * p.HV, 2, 1), BY_HAND, FINE=fine(p), follows=True, **own, **MAPS
    )


def run_compose_maps(c: Draft, w: SegmentedScan) -> None:
    _compose(c, w.B, w.Phi, w.starts, w.length, c.x.initial_state, back=False)


def run_compose_back(c: Draft, w: SegmentedScan, D: Layout, ends: Layout, dfinal: Layout | None) -> None:
    """Computes ``ends``, the gradient of the state at the end of every segment. ``D``: the gradient that
    `scan_gradients` computes at a segment's start if the gradient at its end is zero, or is ``dfinal`` in a sequence's
    last segment."""
    _compose(c, D, w.Phi, ends, w.length, dfinal, back=True)


def _compose(
    c: Draft, B: Layout, Phi: Layout, starts: Layout, length: int, initial: Layout | None, *, back: bool
) -> None:
    p, tile = c.p, compose_tile(c.p, c.chip)
    pointers, grid = (B, Phi, starts, c.x.cu_seqlens, initial), (p.V // tile.BV, p.HV, p.N)
    scalars = p.N, p.T, length, arguments.states(p, initial)
    arguments.launch_rule(
        c, compose_maps, pointers, grid, tile, *scalars, INITIAL=initial is not None, BACK=back, follows=True
    )
