"""The maps of segments, S_end = Phi S + B, with A at hand (factor.py), and what `compose` makes of them: the state that
every segment starts from.

    load     k, rates and A of a chunk, of B v, too, into a ring of NS slots: one warp
    state    R = v - e^G . (k S0)     U = A R     S1 = gamma S0 + (e^{G_C - G} . k)^T U

A program walks half of a segment's columns, two warp groups with 64 each, or of heads of 64 one: those of Phi, of a
state that starts as the identity and meets no values, or those of B, which of a sequence's first segment is the state
that it ends with. So the first segment needs no Phi, and the last one nothing. Phi that has become zero stays it: there
its program ends, bit for bit as if it had gone on; those of Phi are launched first, so that others take their place.

`compose` multiplies bfloat16 in two parts each, three products of four: 2^-16, where the walk itself rounds to 2^-9.
"""

import triton
import triton.language as tl
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_delta.kernels.device.chunk import bounds, count_slots, follow, lead
from flash_delta.kernels.hopper.boxes import lines, parts, ragged, rows, squares, states, token_stride
from flash_delta.kernels.hopper.forward.state_copies import apart_all, load_state, store_state
from flash_delta.kernels.hopper.gluon_compat import barrier, reinterpret, tma_load, tma_store
from flash_delta.kernels.hopper.layouts import FLAGS, LANES, LINES, ROWS, THREADS, TILE, C
from flash_delta.kernels.hopper.rings import barriers, load_box, rate
from flash_delta.kernels.hopper.segments.bounds import find_chunks
from flash_delta.kernels.hopper.segments.factor import load_rates
from flash_delta.kernels.hopper.segments.memory import HALF, Walk
from flash_delta.kernels.hopper.tiles import COMPOSE, MAPS
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.descriptors import DescribedPlan, launch_described
from flash_delta.kernels.runtime.launch import Plan, launch
from flash_delta.kernels.triton.forward.scan import load_state as load_rows
from flash_delta.kernels.triton.forward.scan import store_state as store_rows

PART = gl.constexpr(8)  # chunks after which Phi is looked at
NEVER = gl.constexpr(2**30)


@gluon.jit
def find_map(length, cu_seqlens, N, T, PACKED: gl.constexpr):
    """What `find_chunks` says, but no chunks where a map has nothing to be found, and whether it is Phi."""
    keys = 1 - gl.program_id(2)
    n, row, start, size, token, chunks, slot, number, last = find_chunks(length, cu_seqlens, N, T, PACKED)
    if last | ((number == 0) & (keys > 0)):
        chunks = chunks * 0
    return n, row, start, size, token, chunks, slot, number, keys


@gluon.jit
def load_role(
    descs, tiles, flags, bars, cu_seqlens, length, N, T, k_batch, v_batch, heads, group, HV,
    WIDTH: gl.constexpr, NS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    k_desc, v_desc, r_desc, a_desc = descs
    sk, sv, sv2, sr, sa = tiles
    full, done = bars
    _, row, start, size, token, chunks, slot, _, keys = find_map(length, cu_seqlens, N, T, PACKED)
    hv = gl.program_id(1)
    h = hv // group
    bytes: gl.constexpr = C * WIDTH * 2 + 8 * C * 4 + C * C * 2
    if chunks == 0:
        gdc_wait()  # that no kernel behind this one may think that those before it have ended
    c, going = chunks * 0, chunks > 0
    while going:
        s = c % NS
        bar, at = full.index(s), token + c * C
        mbarrier.wait(done.index(s), ((c // NS) & 1) ^ 1)
        faded = gl.max(flags.index(0).load(LANES) * flags.index(1).load(LANES), 0)
        if faded > 0:
            flags.index(2).store(gl.full([32], 0, gl.int32, LANES) + c)
            mbarrier.arrive(bar, count=1)
        else:
            if keys == 0:
                mbarrier.expect(bar, bytes + C * WIDTH * 2)
                load_box(v_desc, row * v_batch + start, size, at, hv * heads[1], bar, sv.index(s), 64)
                if WIDTH == 128:
                    load_box(v_desc, row * v_batch + start, size, at, hv * heads[1] + 64, bar, sv2.index(s), 64)
            else:
                mbarrier.expect(bar, bytes)
            load_box(k_desc, row * k_batch + start, size, at, h * heads[0], bar, sk.index(s), WIDTH)
            if c == 0:
                gdc_wait()  # the kernels before have ended: what they wrote is there
            index = (slot + c) * HV + hv
            load_rates(r_desc, index, bar, sr, s)
            tma_load(a_desc, [index * C, 0], bar, sa.index(s))
        c += 1
        going = (c < chunks) & (faded == 0)


@gluon.jit
def map_role(
    tiles, so, sbar, flags, bars, initial, B_desc, Phi_desc, cu_seqlens, length, N, T, v, HV,
    WIDTH: gl.constexpr, NS: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, PACKED: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    sk, sv, sr, sa = tiles
    full, done = bars
    WIDE_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])  # [64, WIDTH]
    operand: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    wide_operand: gl.constexpr = gl.DotOperandLayout(0, WIDE_ROWS, 2)
    ty: gl.constexpr = sk.dtype
    zero = gl.zeros([64, C], gl.float32, ROWS)
    n, _, _, _, _, chunks, _, number, keys = find_map(length, cu_seqlens, N, T, PACKED)
    index = gl.program_id(0) * HV + gl.program_id(1)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_ROWS))[:, None]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE_ROWS))[None, :]
    S = gl.where((i + v + (1 - keys) * WIDTH) == c, 1.0, 0.0) + gl.zeros([64, WIDTH], gl.float32, WIDE_ROWS)
    if INITIAL:  # noqa: SIM102 (a constant, then a number)
        if (number == 0) & (keys == 0):
            head = (n * HV + gl.program_id(1)) * WIDTH
            S = load_state(initial, None, head, v, so, sbar, WIDTH, V_FIRST, 1, WIDE_ROWS)
    mbarrier.wait(full.index(0), 0, pred=chunks > 0)
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
            if KEEP:
                R *= rate(sr, s, 3).load(ROWS)
            R = gl.convert_layout(R.to(ty), operand)
            U = warpgroup_mma(R, sa.index(s).permute([1, 0]), zero, use_acc=False, is_async=True)
            S *= rate(sr, s, 7).slice(0, 1, 1).load(WIDE_ROWS)
            U = warpgroup_mma_wait(0, deps=[U])
            U = (U * rate(sr, s, 6).load(ROWS)).to(ty)
            S = warpgroup_mma(gl.convert_layout(U, wide_operand), sk.index(s), S, is_async=True)
            S = warpgroup_mma_wait(0, deps=[S])
            mbarrier.arrive(done.index(s), count=1)
            # The next chunk's; without one, that of whatever lies there.
            sb = gl.convert_layout(S.to(ty), operand)
            mbarrier.wait(full.index(later), ((t + 1) // NS) & 1, pred=t + 1 < chunks)
            E = warpgroup_mma(sb, sk.index(later).permute([1, 0]), zero, use_acc=False, is_async=True)
            E = warpgroup_mma_wait(0, deps=[E])
        begin = end
        left = gl.max(gl.max(gl.maximum(S, -S), 1), 0)
        going = (end < chunks) & ((keys == 0) | (left > 0))
    if begin < chunks:
        leave(flags, v // 64, full, done, begin, chunks, NS)
    if chunks > 0:
        if keys == 0:
            store_state(B_desc, S, None, index * WIDTH, v, so, WIDTH, True, 1)
        else:
            store_parts(Phi_desc, S, index * 2 * WIDTH + v, so, WIDTH)


@gluon.jit
def leave(flags, which, full, done, t, chunks, NS: gl.constexpr):
    """Lets what has been loaded go by, until the loads end, which they do when both groups are here."""
    flags.index(which).store(gl.full([32], 1, gl.int32, THREADS))
    going = t < chunks
    while going:
        mbarrier.wait(full.index(t % NS), (t // NS) & 1)
        end = gl.max(flags.index(2).load(THREADS), 0)
        mbarrier.arrive(done.index(t % NS), count=1)
        t += 1
        going = (t < chunks) & (t <= end)


@gluon.jit
def store_parts(desc, S, row, so, WIDTH: gl.constexpr):
    """As two numbers of bfloat16 each, those of the first parts in the WIDTH rows before those of the second."""
    high = S.to(gl.bfloat16)
    low = (S - high.to(gl.float32)).to(gl.bfloat16)
    COUNT: gl.constexpr = WIDTH // 64
    parts = apart_all(high, COUNT) + apart_all(low, COUNT)
    tile = reinterpret(so.index(0), gl.bfloat16, [64, 64], TILE)
    for m in gl.static_range(2 * COUNT):
        tma.store_wait(0)
        barrier()
        tile.store(gl.convert_layout(parts[m], ROWS))
        fence_async_shared()
        barrier()
        tma_store(desc, [row + m // COUNT * WIDTH, m % COUNT * 64], tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "N", "T", "k_batch", "v_batch", "group", "HV"])
def find_maps(
    k_desc, v_desc, r_desc, a_desc, initial, B_desc, Phi_desc, cu_seqlens, length, N, T, k_batch, v_batch, heads,
    group, HV,
    WIDTH: gl.constexpr, INITIAL: gl.constexpr, V_FIRST: gl.constexpr, PACKED: gl.constexpr, KEEP: gl.constexpr,
    NS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (slots of segments, HV, 2)."""
    GROUPS: gl.constexpr = WIDTH // 64
    gdc_launch_dependents()
    ty: gl.constexpr = k_desc.dtype
    sk = gl.allocate_shared_memory(ty, [NS, C, WIDTH], TILE)
    sv = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sv2 = sv
    if GROUPS == 2:
        sv2 = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [2 * NS, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [NS, C, C], TILE)
    so = gl.allocate_shared_memory(ty, [1, C, C], TILE)
    so2 = so
    if GROUPS == 2:
        so2 = gl.allocate_shared_memory(ty, [1, C, C], TILE)
    sbar, sbar2, full, done = barriers(1, 1), barriers(1, 1), barriers(NS, 1), barriers(NS, GROUPS)
    flags = gl.allocate_shared_memory(gl.int32, [3, 32], FLAGS)  # Phi is zero, one per group; where the loads end
    flags.index(0).store(gl.full([32], 0, gl.int32, THREADS))
    flags.index(1).store(gl.full([32], 2 - GROUPS, gl.int32, THREADS))  # a group that is not there
    flags.index(2).store(gl.full([32], NEVER, gl.int32, THREADS))
    fence_async_shared()
    barrier()
    first = gl.program_id(0) * 0  # a number, not a constant: both groups are compiled as one function
    left, right = (sk, sv, sr, sa), (sk, sv2, sr, sa)
    if GROUPS == 2:
        gl.warp_specialize([
            (map_role, (left, so, sbar, flags, (full, done), initial, B_desc, Phi_desc, cu_seqlens, length, N, T, first,
                        HV, WIDTH, NS, INITIAL, V_FIRST, PACKED, KEEP)),
            (map_role, (right, so2, sbar2, flags, (full, done), initial, B_desc, Phi_desc, cu_seqlens, length, N, T,
                        first + 64, HV, WIDTH, NS, INITIAL, V_FIRST, PACKED, KEEP)),
            (load_role, ((k_desc, v_desc, r_desc, a_desc), (sk, sv, sv2, sr, sa), flags, (full, done), cu_seqlens,
                         length, N, T, k_batch, v_batch, heads, group, HV, WIDTH, NS, PACKED)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (map_role, (left, so, sbar, flags, (full, done), initial, B_desc, Phi_desc, cu_seqlens, length, N, T, first,
                        HV, WIDTH, NS, INITIAL, V_FIRST, PACKED, KEEP)),
            (load_role, ((k_desc, v_desc, r_desc, a_desc), (sk, sv, sv2, sr, sa), flags, (full, done), cu_seqlens,
                         length, N, T, k_batch, v_batch, heads, group, HV, WIDTH, NS, PACKED)),
        ], [1], [24])  # fmt: skip


@triton.jit(do_not_specialize=["N", "T", "length", "HV"])
def compose(
    B, Phi, starts, cu_seqlens, initial_state, N, T, length, HV, initial_strides,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``starts [slots, HV, V, K]`` of B [slots, HV, V, K] and Phi [slots, HV, 2, K, K]. Grid (V / BV, HV, N)."""
    lead(OVERLAP)
    d, hv, n = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, K)
    start, stop, slot = bounds(n, cu_seqlens, N, T, length, PACKED)
    segments = (stop - start + length - 1) // length
    strides, square = (HV.to(tl.int64) * V * K, V * K, 1, K), c[:, None] * K + c[None, :]
    S = tl.zeros([BV, K], tl.float32)
    if INITIAL:
        S = load_rows(initial_state, initial_strides, n, hv, d, c, V, K)
    follow(OVERLAP)
    store_rows(starts, strides, S, slot, hv, d, c, V, K)
    S = load_rows(B, strides, slot, hv, d, c, V, K, segments > 1)
    store_rows(starts, strides, S, slot + 1, hv, d, c, V, K, segments > 1)
    B_ahead = load_rows(B, strides, slot + 1, hv, d, c, V, K, segments > 2)
    for number in range(1, segments - 1):
        at = Phi + ((slot + number).to(tl.int64) * HV + hv) * (2 * K * K) + square
        Phi_high, Phi_low = tl.load(at), tl.load(at + K * K)
        high = S.to(tl.bfloat16)
        low = (S - high.to(tl.float32)).to(tl.bfloat16)
        small = tl.dot(low, Phi_high) + tl.dot(high, Phi_low)  # apart: a product waits for the one before it in a sum
        S = tl.dot(high, Phi_high, B_ahead) + small
        B_ahead = load_rows(B, strides, slot + number + 1, hv, d, c, V, K, number + 2 < segments)
        store_rows(starts, strides, S, slot + number + 1, hv, d, c, V, K)


def run_maps(c: Call, rates: Tensor, w: Walk) -> None:
    p, x = c.p, c.x
    initial = w.B if x.initial_state is None else x.initial_state
    arguments = (
        ragged(x.k, p.K), ragged(x.v, HALF), lines(rates), squares(w.A), states(p, initial), rows(w.B), parts(w.Phi),
        x.cu_seqlens, w.length, p.N, p.T, token_stride(x.k), token_stride(x.v), (x.k.stride(2), x.v.stride(2)),
        p.HV // p.H, p.HV,
    )  # fmt: skip
    constants = {
        "WIDTH": p.K, "INITIAL": x.initial_state is not None, "V_FIRST": p.state_v_first, "PACKED": p.packed,
        "KEEP": p.needs_grad, **MAPS[p.K],
    }  # fmt: skip
    plan = DescribedPlan((count_slots(p, w.length), p.HV, 2), arguments, constants)
    launch_described(c, find_maps, lambda: [plan], {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True})


def run_compose(c: Call, w: Walk) -> None:
    p, initial = c.p, c.x.initial_state
    key, value = (3, 2) if p.state_v_first else (2, 3)
    strides = (0,) * 4 if initial is None else tuple(initial.stride(axis) for axis in (0, 1, key, value))
    constants = {
        "K": p.K, "V": p.V, "BV": COMPOSE.BV, "PACKED": p.packed, "INITIAL": initial is not None,
        "OVERLAP": p.device.type != "cpu",
    }  # fmt: skip
    plan = Plan(
        (p.V // COMPOSE.BV, p.HV, p.N), COMPOSE, (p.N, p.T, w.length, p.HV, strides), constants,
        follows=p.device.type != "cpu",
    )  # fmt: skip
    launch(c, compose, (w.B, w.Phi, w.starts, c.x.cu_seqlens, initial), lambda: [plan])
