"""The roles of the loop with one warp: one loads q, k and g, one loads v, and one writes zeros to o. With a strength
per channel the first also loads b, and the second w."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.kernels.hopper.channel.parts import STEP, find_part
from flash_delta.kernels.hopper.channel.scores import K
from flash_delta.kernels.hopper.device.layouts import TOKENS, C
from flash_delta.kernels.hopper.device.rings import load_box, wait_free
from flash_delta.kernels.hopper.device.work_items import clear_padding, find_pieces


@gluon.jit
def load_keys(descs, tiles, bars, places, work, HV):
    """The role that loads q, k, g and b."""
    NR: gl.constexpr = tiles.q.shape[0]
    COUNT: gl.constexpr = 2 if descs.b is None else 3
    t = 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        part = find_part(piece, pieces, work, HV)
        n, hv, start, size = part.n, part.hv, part.start, part.size
        if work.cu_seqlens is not None:
            n = n * 0
        h = hv // places.group
        for token in range(part.first, part.end, STEP):
            s = t % NR
            wait_free(bars.left, t, NR, NR)  # signalled by the gate group, which has read the tokens in this slot
            g_full, full = bars.g_full.index(s), bars.full.index(s)
            mbarrier.expect(g_full, STEP * K * (4 if descs.g.dtype == gl.float32 else 2))
            load_box(descs.g, n * places.g_batch + start, size, token, hv * places.g_head, g_full, tiles.g.index(s), K)
            mbarrier.expect(full, COUNT * STEP * K * 2)
            load_box(descs.q, n * places.q_batch + start, size, token, h * places.q_head, full, tiles.q.index(s), K)
            load_box(descs.k, n * places.k_batch + start, size, token, h * places.k_head, full, tiles.k.index(s), K)
            if descs.b is not None:
                load_box(
                    descs.b, n * places.b_batch + start, size, token, hv * places.b_head, full, tiles.b.index(s), K
                )
            t += 1


@gluon.jit
def load_values(descs, sv, sw, bars, places, block, work, NS: gl.constexpr, HV):
    """The role that loads v and w."""
    NV: gl.constexpr = sv.shape[0]
    V: gl.constexpr = sv.shape[2]
    COUNT: gl.constexpr = 1 if sw is None else 2
    t = 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        part = find_part(piece, pieces, work, HV)
        n, hv, start, size = part.n, part.hv, part.start, part.size
        if work.cu_seqlens is not None:
            n = n * 0
        for token in range(part.first, part.end, STEP):
            s = t % NV
            wait_free(bars.v_done, t, NV, NS)  # signalled by the state group, which has read the tokens in this slot
            full = bars.v_full.index(s)
            mbarrier.expect(full, COUNT * STEP * V * 2)
            column = hv * places.v_head + block * V
            load_box(descs.v, n * places.v_batch + start, size, token, column, full, sv.index(s), V)
            if sw is not None:
                column = hv * places.w_head + block * V
                load_box(descs.w, n * places.w_batch + start, size, token, column, full, sw.index(s), V)
            t += 1


@gluon.jit
def clear_role(o, work, HV):
    """Writes zeros to o after the last sequence. On a pool `list_prompts` does this."""
    items, T = work.items, work.T
    if work.cu_seqlens is not None and work.prompts is None:
        N, program = items // HV, gl.program_id(0)
        if work.parts is not None:
            N = items // (HV * work.parts)
            program = gl.where(items > 0, program, T)  # if there is no work, `prepare` does this
        i = gl.arange(0, C, layout=gl.SliceLayout(0, TOKENS))[None, :]
        clear_padding(o, work.cu_seqlens, N, T, i, program, gl.num_programs(0), HV * K)
