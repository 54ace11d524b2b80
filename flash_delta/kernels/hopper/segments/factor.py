"""The first kernel of a walk in segments: A = (I + diag(b) L)^{-1} diag(b) of every chunk, for `find_maps` and
`walk_segments`. With KEEP the factor diag(b) at the end is left out, as the backward pass needs it.

A program has one warp group. Four programs share a multiprocessor, so that some compute while others wait.
Grid (slots, HV / members): a program takes ``members`` value heads, which share k.
"""

from math import gcd

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

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.hopper.boxes import lines, ragged, squares, token_stride
from flash_delta.kernels.hopper.forward.inverse import invert
from flash_delta.kernels.hopper.forward.rate_role import clear_padding, find_rates, load_gates, makes_rates
from flash_delta.kernels.hopper.gluon_compat import barrier, tma_store
from flash_delta.kernels.hopper.layouts import BY_WARP, HALF, LINES, PAIRS, ROWS, TILE, C
from flash_delta.kernels.hopper.rings import barriers, load_box, load_rates, rate
from flash_delta.kernels.hopper.segments.bounds import find_segment
from flash_delta.kernels.hopper.segments.memory import Walk
from flash_delta.kernels.hopper.tiles import FACTOR, MEMBERS
from flash_delta.kernels.runtime.arguments import batch, constants_of, tokens
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.descriptors import DescribedPlan, launch_described


@gluon.jit
def write_rates(gates, rates, sr, s, at, row, hv, start, token, length):
    """Makes the rates of one chunk and head, in slot s and in memory, as `rates` does."""
    g, beta, g_batch, g_strides, beta_batch, beta_strides, scale = gates
    i = gl.arange(0, C, layout=gl.SliceLayout(0, BY_WARP))[None, :]
    rows = (i * 0 + row).to(gl.int64)
    g_row, beta_row = rows * g_batch + hv * g_strides[1], rows * beta_batch + hv * beta_strides[1]
    x, b = load_gates(g, beta, g_row, beta_row, g_strides[0], beta_strides[0], start, token + i, length)
    found = find_rates(x, b, i, scale)
    for row in gl.static_range(8):
        rate(sr, s, row).store(found[row])
        gl.store(rates + ((i * 0 + at).to(gl.int64) * (8 * C) + row * C + i), found[row])


@gluon.jit(do_not_specialize=["N", "T", "k_batch", "HV", "group", "members", "g_batch", "beta_batch", "scale"])
def factor_chunks(
    k_desc, r_desc, a_desc, cu_seqlens, N, T, k_batch, heads, HV, group, members, g, beta, o, rates, o_row, g_batch,
    beta_batch, g_strides, beta_strides, scale,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Without ``r_desc`` it makes the rates, and zeros in o behind the last sequence. ``o_row``: numbers of o per
    token."""
    gdc_launch_dependents()
    MAKES_RATES: gl.constexpr = r_desc is None
    slot, hv = gl.program_id(0), gl.program_id(1) * members
    gates = (g, beta, g_batch, g_strides, beta_batch, beta_strides, scale)
    if MAKES_RATES and PACKED:
        i = gl.arange(0, C, layout=gl.SliceLayout(0, BY_WARP))[None, :]
        program, programs = slot * gl.num_programs(1) + gl.program_id(1), gl.num_programs(0) * gl.num_programs(1)
        clear_padding(o, cu_seqlens, N, T, i, program, programs, o_row)
    _, row, token, start, stop, _, _ = find_segment(slot, C, cu_seqlens, N, T, PACKED)
    if token >= stop:
        return
    ty: gl.constexpr = k_desc.dtype
    sk = gl.allocate_shared_memory(ty, [C, WIDTH], TILE)
    sr = gl.allocate_shared_memory(gl.float32, [4, 1, 4 * C], LINES)
    sa = gl.allocate_shared_memory(ty, [C, C], TILE)
    sM = gl.allocate_shared_memory(gl.float16, [C, C // 2], HALF)
    sT = gl.allocate_shared_memory(gl.float16, [C, C // 2], HALF)
    sD = gl.allocate_shared_memory(gl.float16, [2, 2, 16, 16], PAIRS)
    full, rfull = barriers(1, 1), barriers(2, 1)
    fence_async_shared()
    barrier()  # all warps of the program: the barriers above are initialised
    bar = full.index(0)
    mbarrier.expect(bar, C * WIDTH * 2)
    load_box(k_desc, row * k_batch + start, stop - start, token - start, hv // group * heads[0], bar, sk, WIDTH)
    at = slot * HV + hv
    if MAKES_RATES:
        write_rates(gates, rates, sr, 0, at, row, hv, start, token - start, stop - start)
    else:
        gdc_wait()  # `rates` has ended: what it wrote is there
        mbarrier.expect(rfull.index(0), 8 * C * 4)
        load_rates(r_desc, at, rfull.index(0), sr, 0)
    zero = gl.zeros([C, C], gl.float32, ROWS)
    mbarrier.wait(bar, 0)  # signalled by the copy engine: k is there
    for member in range(members):
        s = member % 2
        scores = warpgroup_mma(sk, sk.permute([1, 0]), zero, use_acc=False, is_async=True)
        if MAKES_RATES:
            if member > 0:
                write_rates(gates, rates, sr, s, at + member, row, hv + member, start, token - start, stop - start)
        else:
            if member + 1 < members:
                mbarrier.expect(rfull.index(1 - s), 8 * C * 4)
                load_rates(r_desc, at + member + 1, rfull.index(1 - s), sr, 1 - s)
            mbarrier.wait(rfull.index(s), (member // 2) & 1)  # signalled by the copy engine: the head's rates are there
        decay = gl.exp2(rate(sr, s, 0).permute([1, 0]).load(ROWS) - rate(sr, s, 1).load(ROWS))
        strength = rate(sr, s, 2).permute([1, 0]).load(ROWS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        M = scores * decay * strength
        left, right = invert(M, rate(sr, s, 3), sM, sT, sD, KEEP)
        tma.store_wait(0)  # the copy engine has read A of the head before
        barrier()  # all warps of the program: none writes before that, and `invert` has ended in all of them
        sa.slice(0, 32, 1).store(left.to(ty))
        sa.slice(32, 32, 1).store(right.to(ty))
        fence_async_shared()
        barrier()  # all warps of the program: A is whole in shared memory
        tma_store(a_desc, [(at + member) * C, 0], sa)
    tma.store_wait(0)


def run_factor_chunks(c: Call, o: Tensor, rates: Tensor, w: Walk) -> None:
    p, x, makes = c.p, c.x, makes_rates(c.p)
    group = p.HV // p.H
    members = gcd(group, MEMBERS)
    arguments = (
        ragged(x.k, p.K), None if makes else lines(rates), squares(w.A), x.cu_seqlens, p.N, p.T, token_stride(x.k),
        (x.k.stride(2),), p.HV, group, members, *((x.g, x.beta, o, rates) if makes else (None,) * 4), p.HV * p.V,
        *map(batch, (x.g, x.beta)), *map(tokens, (x.g, x.beta)), p.scale,
    )  # fmt: skip
    constants = constants_of(c, factor_chunks, arguments, KEEP=p.needs_grad)
    plan = DescribedPlan((count_slots(p), p.HV // members), arguments, constants)
    launch_described(c, factor_chunks, plan, launch_pdl=not makes, **FACTOR)
