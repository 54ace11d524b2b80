"""The roles of the loop that load: of every chunk q, k and rates, and v."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.forward.work_items import bounds, count_items, first_slot
from flash_delta.kernels.hopper.gluon_compat import tma_load
from flash_delta.kernels.hopper.layouts import C
from flash_delta.kernels.hopper.rings import load_box


@gluon.jit
def load_role(
    descs, tiles, bars, cu_seqlens, pool, items, T, q_batch, k_batch, heads, group,
    HV: gl.constexpr, WIDTH: gl.constexpr, NS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, r_desc = descs
    sq, sk, sr = tiles
    full, done = bars
    t = 0
    for item in range(gl.program_id(0), count_items(items, pool, HV), gl.num_programs(0)):
        n, hv, start, length = bounds(item, cu_seqlens, pool, T, HV, PACKED)
        h, batch, slot = hv // group, n, first_slot(n, start, T, PACKED)
        if PACKED:
            batch = n * 0
        for token in range(0, length, C):
            s = t % NS
            bar = full.index(s)
            mbarrier.wait(done.index(s), ((t // NS) & 1) ^ 1)
            mbarrier.expect(bar, C * (WIDTH + WIDTH) * 2 + 8 * C * 4)
            load_box(k_desc, batch * k_batch + start, length, token, h * heads[1], bar, sk.index(s), WIDTH)
            load_box(q_desc, batch * q_batch + start, length, token, h * heads[0], bar, sq.index(s), WIDTH)
            if t == 0:
                gdc_wait()  # `rates` has ended: what it wrote is there
            row = ((slot + token // C) * HV + hv) * 2
            tma_load(r_desc, [row, 0], bar, sr.index(2 * s))
            tma_load(r_desc, [row + 1, 0], bar, sr.index(2 * s + 1))
            t += 1


@gluon.jit
def load_values_role(
    v_desc, sv, bars, cu_seqlens, pool, items, T, v_batch, heads, w,
    HV: gl.constexpr, BV: gl.constexpr, NS: gl.constexpr, NV: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    vfull, done = bars
    t = 0
    for item in range(gl.program_id(0), count_items(items, pool, HV), gl.num_programs(0)):
        n, hv, start, length = bounds(item, cu_seqlens, pool, T, HV, PACKED)
        batch = n
        if PACKED:
            batch = n * 0
        for token in range(0, length, C):
            bar = vfull.index(t % NV)
            before = t + (NS - NV)  # the phase of `done` that says that the chunk before in this slot is done
            mbarrier.wait(done.index(before % NS), ((before // NS) & 1) ^ 1)
            mbarrier.expect(bar, C * BV * 2)
            load_box(v_desc, batch * v_batch + start, length, token, hv * heads[2] + w, bar, sv.index(t % NV), BV)
            t += 1
