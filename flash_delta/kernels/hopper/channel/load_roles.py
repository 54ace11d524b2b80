"""The roles of the loop with one warp: one loads q, k and g, one loads v, and one writes zeros to o."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.kernels.hopper.channel.parts import STEP, find_part, find_work
from flash_delta.kernels.hopper.channel.scores import K
from flash_delta.kernels.hopper.device.layouts import TOKENS, C
from flash_delta.kernels.hopper.device.rings import load_box, wait_free
from flash_delta.kernels.hopper.device.work_items import clear_padding


@gluon.jit
def load_keys(descs, tiles, bars, places, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """The role that loads q, k and g."""
    gfull, full, left = bars
    batches, heads, group = places
    NR: gl.constexpr = tiles[0].shape[0]
    t = 0
    pieces = find_work(work, HV)
    for piece in range(pieces[0], pieces[1], pieces[2]):
        _, n, hv, start, size, first, _, end = find_part(piece, pieces, work, HV, PACKED)
        if PACKED:
            n = n * 0
        h = hv // group
        for token in range(first, end, STEP):
            s = t % NR
            wait_free(left, t, NR, NR)  # signalled by the gate group, which has read the tokens in this slot
            mbarrier.expect(gfull.index(s), STEP * K * (4 if descs[2].dtype == gl.float32 else 2))
            load_box(descs[2], n * batches[2] + start, size, token, hv * heads[2], gfull.index(s), tiles[2].index(s), K)
            mbarrier.expect(full.index(s), 2 * STEP * K * 2)
            load_box(descs[0], n * batches[0] + start, size, token, h * heads[0], full.index(s), tiles[0].index(s), K)
            load_box(descs[1], n * batches[1] + start, size, token, h * heads[1], full.index(s), tiles[1].index(s), K)
            t += 1


@gluon.jit
def load_values(desc, sv, bars, places, work, NS: gl.constexpr, HV: gl.constexpr, PACKED: gl.constexpr):
    """The role that loads v."""
    vfull, vdone = bars
    v_batch, v_heads, block = places
    NV: gl.constexpr = sv.shape[0]
    V: gl.constexpr = sv.shape[2]
    t = 0
    pieces = find_work(work, HV)
    for piece in range(pieces[0], pieces[1], pieces[2]):
        _, n, hv, start, size, first, _, end = find_part(piece, pieces, work, HV, PACKED)
        if PACKED:
            n = n * 0
        for token in range(first, end, STEP):
            s = t % NV
            wait_free(vdone, t, NV, NS)  # signalled by the state group, which has read the tokens in this slot
            mbarrier.expect(vfull.index(s), STEP * V * 2)
            column = hv * v_heads + block * V
            load_box(desc, n * v_batch + start, size, token, column, vfull.index(s), sv.index(s), V)
            t += 1


@gluon.jit
def clear_role(o, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """Writes zeros to o after the last sequence. On a pool `list_prompts` does this."""
    cu_seqlens, T, parts, items, pool, _ = work
    if PACKED and pool is None:
        N, program = items // HV, gl.program_id(0)
        if parts is not None:
            N = items // (HV * parts)
            program = gl.where(items > 0, program, T)  # if there is no work, `prepare` does this
        i = gl.arange(0, C, layout=gl.SliceLayout(0, TOKENS))[None, :]
        clear_padding(o, cu_seqlens, N, T, i, program, gl.num_programs(0), HV * K)
