"""The role that loads, in the loop, `find_maps` and `scan_segments`. It is one warp, which starts copies of tiles,
chunk after chunk. If a kernel does not load a tensor, its descriptor is None."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.inverse_tiles import BYTES, load_inverse, tiles_in
from flash_delta.kernels.hopper.device.layouts import LANES, C
from flash_delta.kernels.hopper.device.rings import load_box, load_rates, wait_free
from flash_delta.kernels.hopper.device.segment_bounds import find_map, is_Phi, place, without_faded
from flash_delta.kernels.hopper.device.work_items import find_pieces, find_run

# One of each for the tensors of a chunk: rings of tiles, descriptors, or numbers; None if there is none. ``v2``: the
# second 64 columns of v, if they are apart. In the backward pass v is dO, and S is the state before the chunk.
ChunkTiles = namedtuple("ChunkTiles", "q k v rates A P v2 S U dS dV L", defaults=[None] * 12)


@gluon.jit
def load_chunk(
    descs, tiles, bar, s, hv, run, token, index, batches, heads, group, column, valued, first, STEPS: gl.constexpr
):
    """Starts copies of the tiles of a run's chunk to slot s, and tells ``bar`` how many bytes will arrive. ``index``:
    the number of the chunk and head."""
    q_desc, k_desc, v_desc, r_desc, a_desc = descs.q, descs.k, descs.v, descs.rates, descs.A
    row, start, size = run.row, run.start, run.size
    WIDTH: gl.constexpr = tiles.k.shape[2]
    VALUES: gl.constexpr = 0 if v_desc is None else tiles.v.shape[2] if tiles.v2 is None else 128
    Q: gl.constexpr = 0 if q_desc is None else C * WIDTH * 2
    FINE: gl.constexpr = a_desc is not None and tiles.A.shape[0] == 3 * tiles.k.shape[0]
    A: gl.constexpr = 0 if a_desc is None else BYTES * (3 if FINE else 2)
    R: gl.constexpr = 0 if r_desc is None else 8 * C * 4
    ALL: gl.constexpr = 0 if k_desc is None else C * WIDTH * 2 + Q + R + A
    if v_desc is None:
        mbarrier.expect(bar, ALL)
    elif valued:
        mbarrier.expect(bar, ALL + C * VALUES * 2)
        value, v_row = hv * heads.v + column, row * batches.v + start
        if tiles.v2 is None:
            load_box(v_desc, v_row, size, token, value, bar, tiles.v.index(s), VALUES)
        else:
            load_box(v_desc, v_row, size, token, value, bar, tiles.v.index(s), 64)
            load_box(v_desc, v_row, size, token, value + 64, bar, tiles.v2.index(s), 64)
    else:
        mbarrier.expect(bar, ALL)
    if k_desc is not None:
        h = hv // group
        load_box(k_desc, row * batches.k + start, size, token, h * heads.k, bar, tiles.k.index(s), WIDTH)
        if q_desc is not None:
            load_box(q_desc, row * batches.q + start, size, token, h * heads.q, bar, tiles.q.index(s), WIDTH, STEPS)
        if r_desc is not None:
            if first:
                gdc_wait()  # the kernels before this one have ended, and their results can be read
            load_rates(r_desc, index, bar, tiles.rates, s)
        if a_desc is not None:
            load_inverse(a_desc, index, bar, tiles_in(tiles.A, s, FINE), FINE)


@gluon.jit
def end_early(flags, bar, c):
    """Whether all state groups of a map have reported that Phi is zero. If so, it tells these groups that chunk c is
    not loaded and is the last one."""
    ended = gl.max(flags.index(0).load(LANES) * flags.index(1).load(LANES), 0) > 0
    if ended:
        flags.index(2).store(gl.full([32], 0, gl.int32, LANES) + c)
        mbarrier.arrive(bar, count=1)
    return ended


@gluon.jit
def load_role(
    descs, tiles, batches, heads, group, full, done, work, HV, column, flags=None, left=None, STEPS: gl.constexpr = 1
):
    """Fills a ring with k and rates, q, A, and columns of v from ``column`` on.

    ``descs``, ``tiles``, and strides between ``batches`` and ``heads``: `ChunkTiles`. ``full``: one barrier per slot of
    this ring. ``done``: one per slot of the program's longest ring. ``flags``, ``left``: those of `find_maps`, whose
    state groups may end early, and how many chunks it has to scan. STEPS: as in rings.py."""
    SLOTS: gl.constexpr = full.shape[0]
    NS: gl.constexpr = done.shape[0]
    pieces, t = find_pieces(work, HV), 0
    for i in range(pieces.begin, pieces.end, pieces.step):
        if flags is None:
            hv, _, run = find_run(i, pieces, work, HV)
            valued = run.chunks * 0 == 0
        else:
            run = without_faded(find_map(work, HV), left)
            _, hv = place(HV)
            valued = is_Phi() == 0
        c, going = run.chunks * 0, run.chunks > 0
        while going:
            s = t % SLOTS
            wait_free(done, t, SLOTS, NS)  # signalled by the state groups, which have left the chunk in this slot
            ended = c * 0 > 0
            if flags is not None:
                ended = end_early(flags, full.index(s), c)
            if not ended:
                token, index = run.token + c * C, (run.chunk + c) * HV + hv
                bar, first = full.index(s), t == 0
                load_chunk(
                    descs, tiles, bar, s, hv, run, token, index, batches, heads, group, column, valued, first, STEPS
                )
            c += 1
            t += 1
            going = (c < run.chunks) & (not ended)
