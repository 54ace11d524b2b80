"""The first kernel of a scan in segments. It computes A = (I + diag(b) L)^{-1} of every chunk, for `find_maps`,
`scan_segments` and the backward pass.

A program has one warp group. Four programs share a multiprocessor, so that some compute while others wait.
Grid (slots, HV / members): a program takes ``members`` value heads, which share k.
"""

from math import gcd

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
from flash_delta.kernels.hopper.device.inverse import invert
from flash_delta.kernels.hopper.device.inverse_tiles import fine, is_fine, put_inverse, store_inverse, tiles_in
from flash_delta.kernels.hopper.device.layouts import HALF, LINES, PAIRS, ROWS, TILE, C
from flash_delta.kernels.hopper.device.load_role import ChunkTiles
from flash_delta.kernels.hopper.device.rings import barriers, load_box, load_rates, rate
from flash_delta.kernels.hopper.device.segment_bounds import find_segment, part_length
from flash_delta.kernels.hopper.plans.boxes import inverses, lines, ragged, token_stride
from flash_delta.kernels.hopper.plans.tiles import FACTOR, FACTOR_PROGRAMS, MEMBERS
from flash_delta.kernels.hopper.scalar.segments.memory import PromptParts, SegmentedScan
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.plan import Draft, Layout


@gluon.jit
def factor_chunk(
    descs, tiles, scratch, full, rfull, slot, hv, segment, k_batch, k_head, t, HV, group, members, WIDTH: gl.constexpr
):
    """Computes A of the chunk in a slot, for some value heads from ``hv`` on. ``segment``: the chunk, as a `Segment`.
    ``scratch``: of `invert`. ``t``: how many chunks the program has factored before."""
    sk, sr, sa = tiles.k, tiles.rates, tiles.A
    sM, sT, sD = scratch
    row, size, token = (
        segment.row * k_batch + segment.start,
        segment.stop - segment.start,
        segment.token - segment.start,
    )
    FINE: gl.constexpr = sa.shape[0] == 3
    bar = full.index(0)
    mbarrier.expect(bar, C * WIDTH * 2)
    load_box(descs.k, row, size, token, hv // group * k_head, bar, sk, WIDTH)
    gdc_wait()  # `rates` has ended, and its results can be read
    at, first = slot * HV + hv, t * members
    mbarrier.expect(rfull.index(first % 2), 8 * C * 4)
    load_rates(descs.rates, at, rfull.index(first % 2), sr, first % 2)
    zero = gl.zeros([C, C], gl.float32, ROWS)
    mbarrier.wait(bar, t & 1)  # signalled by the copy engine: k has arrived
    for member in range(members):
        s = (first + member) % 2
        scores = warpgroup_mma(sk, sk.permute([1, 0]), zero, use_acc=False, is_async=True)
        if member + 1 < members:
            mbarrier.expect(rfull.index(1 - s), 8 * C * 4)
            load_rates(descs.rates, at + member + 1, rfull.index(1 - s), sr, 1 - s)
        # Signalled by the copy engine: this head's rates arrived.
        mbarrier.wait(rfull.index(s), ((first + member) // 2) & 1)
        decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))
        strength = rate(sr, s, 2).permute([1, 0]).load(ROWS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        M = scores * decay * strength
        diagonal, below = invert(M, sM, sT, sD)
        tma.store_wait(0)  # the copy engine has read A of the previous head
        barrier()  # all warps of the program: none writes earlier, and `invert` has ended in all of them
        A, fine = tiles_in(sa, 0, FINE), is_fine(sr, s, FINE)
        put_inverse(A, diagonal, below, fine)
        fence_async_shared()
        barrier()  # all warps of the program: A is whole in shared memory, and k and rates have been read
        store_inverse(descs.A, at + member, A, fine)


@gluon.jit(do_not_specialize=["N", "T", "slots", "k_batch", "members", "shortest", "fewest", "most", "HV", "group"])
def factor_chunks(
    k_desc, r_desc, a_desc, cu_seqlens, parts, N, T, slots, k_batch, heads, members, shortest, fewest, most, HV, group,
    WIDTH: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """``parts``, ``shortest``, ``fewest``, ``most``: those of prompts on a pool. Then only the chunks before a prompt's
    last part are needed, and programs take ``slots`` in turns."""
    gdc_launch_dependents()
    slot, hv = gl.program_id(0), gl.program_id(1) * members
    (k_head,) = heads
    if parts is not None:
        gdc_wait()  # `rates` has ended, so a kernel that waits for this one also waits for earlier kernels
        if gl.load(parts) == 0:
            return
    else:
        segment = find_segment(slot, C, cu_seqlens, N, T)
        if segment.token >= segment.stop:
            return
    ty: gl.constexpr = k_desc.dtype
    sk = gl.allocate_shared_memory(ty, [C, WIDTH], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [4, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [3 if FINE else 2, C, C // 2], HALF)
    sM = gl.allocate_shared_memory(gl.float16, [C, C // 2], HALF)
    sT = gl.allocate_shared_memory(gl.float16, [C, C // 2], HALF)
    sD = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], PAIRS)
    full, rfull = barriers(1, 1), barriers(2, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    descs, tiles = ChunkTiles(k=k_desc, rates=r_desc, A=a_desc), ChunkTiles(k=sk, rates=sr, A=sa)
    scratch = (sM, sT, sD)
    if parts is None:
        factor_chunk(
            descs, tiles, scratch, full, rfull, slot, hv, segment, k_batch, k_head, 0, HV, group, members, WIDTH
        )
    else:
        t = 0
        for slot in range(gl.program_id(0), slots, gl.num_programs(0)):
            segment = find_segment(slot, C, cu_seqlens, N, T)
            _, needed = part_length(segment.stop - segment.start, (shortest, fewest, most))
            if (segment.token < segment.stop) & (segment.number < needed):
                factor_chunk(
                    descs, tiles, scratch, full, rfull, slot, hv, segment, k_batch, k_head, t, HV, group, members, WIDTH
                )
                t += 1
    tma.store_wait(0)


def run_factor_chunks(c: Draft, rates: Layout, w: SegmentedScan | PromptParts) -> None:
    p, x = c.p, c.x
    slots, members = count_slots(p), gcd(p.HV // p.H, MEMBERS)
    parts, cut, programs = None, (None,) * 3, slots
    if isinstance(w, PromptParts):
        parts, cut = w.listed, w.cut
        programs = min(slots, max(1, FACTOR_PROGRAMS * c.chip.processors * members // p.HV))
    arguments = (
        ragged(x.k, p.K), lines(rates), inverses(w.A), x.cu_seqlens, parts, p.N, p.T, slots, token_stride(x.k),
        (x.k.stride(2),), members, *cut,
    )  # fmt: skip
    launch_rule(c, factor_chunks, arguments, (programs, p.HV // members, 1), FACTOR, FINE=fine(p), follows=True)
