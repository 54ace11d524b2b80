"""The role that loads, in the loop, `find_maps` and `scan_segments`. It is one warp, which starts copies of tiles,
chunk after chunk. If a kernel does not load a tensor, its descriptor is None."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.inverse_tiles import BYTES, load_inverse, tiles_in
from flash_delta.kernels.hopper.device.layouts import LANES, C
from flash_delta.kernels.hopper.device.rings import load_box, load_rates, wait_free
from flash_delta.kernels.hopper.device.segment_bounds import find_map, place, without_faded
from flash_delta.kernels.hopper.device.work_items import find_run, find_runs


@gluon.jit
def find_work(i, runs, work, flags, HV, PACKED: gl.constexpr, SEGMENTS: gl.constexpr):
    """The chunks of run i: value head, batch row, the sequence's first token and length, the first chunk's
    token in the sequence, the number of chunks, the first chunk's slot; and whether v is needed."""
    if flags is None:
        hv, row, start, size, token, chunks, slot, _, _, _, _ = find_run(i, runs, work, HV, PACKED, SEGMENTS)
        return hv, row, start, size, token, chunks, slot, chunks * 0 == 0
    else:
        cu_seqlens, T, length, N, listed = work
        _, row, start, size, token, chunks, slot, _, keys = find_map(HV, length, cu_seqlens, N, T, PACKED, listed)
        token, chunks, slot, _ = without_faded(token, chunks, slot, keys, flags[1])
        return place(HV)[1], row, start, size, token, chunks, slot, keys == 0


@gluon.jit
def load_chunk(descs, tiles, bar, s, where, strides, column, valued, first, WIDTH: gl.constexpr, VALUES: gl.constexpr):
    """Starts copies of the tiles of one chunk to slot s, and tells ``bar`` how many bytes will arrive."""
    q_desc, k_desc, v_desc, r_desc, a_desc = descs
    sq, sk, sv, sv2, sr, sa = tiles
    hv, row, start, size, token, index = where
    batches, heads, group = strides
    Q: gl.constexpr = 0 if q_desc is None else C * WIDTH * 2
    FINE: gl.constexpr = a_desc is not None and sa.shape[0] == 3 * sk.shape[0]
    A: gl.constexpr = 0 if a_desc is None else BYTES * (3 if FINE else 2)
    R: gl.constexpr = 0 if r_desc is None else 8 * C * 4
    ALL: gl.constexpr = 0 if k_desc is None else C * WIDTH * 2 + Q + R + A
    if v_desc is None:
        mbarrier.expect(bar, ALL)
    elif valued:
        mbarrier.expect(bar, ALL + C * VALUES * 2)
        value, v_row = hv * heads[2] + column, row * batches[2] + start
        if sv2 is None:
            load_box(v_desc, v_row, size, token, value, bar, sv.index(s), VALUES)
        else:
            load_box(v_desc, v_row, size, token, value, bar, sv.index(s), 64)
            load_box(v_desc, v_row, size, token, value + 64, bar, sv2.index(s), 64)
    else:
        mbarrier.expect(bar, ALL)
    if k_desc is not None:
        h = hv // group
        load_box(k_desc, row * batches[1] + start, size, token, h * heads[1], bar, sk.index(s), WIDTH)
        if q_desc is not None:
            load_box(q_desc, row * batches[0] + start, size, token, h * heads[0], bar, sq.index(s), WIDTH)
        if r_desc is not None:
            if first:
                gdc_wait()  # the kernels before this one have ended, and their results can be read
            load_rates(r_desc, index, bar, sr, s)
        if a_desc is not None:
            load_inverse(a_desc, index, bar, tiles_in(sa, s, FINE), FINE)


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
    given, HV, column, WIDTH: gl.constexpr, VALUES: gl.constexpr, NS: gl.constexpr, SLOTS: gl.constexpr,
    PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    """Fills a ring of so many SLOTS with k and rates, q, A, and VALUES columns of v from ``column`` on. If there is an
    ``sv2``, it gets the second 64 of these columns.

    given: (descs, tiles, flags, bars, work, strides), where descs and tiles are as in `load_chunk`.
    work: as in work_items.py; for `find_maps` followed by the last argument of `find_map`.
    strides: the tokens between batch rows of (q, k, v), the strides between heads of (q, k, v), and the value heads per
    key head.
    bars: ``full``, one per slot of this ring, and ``done``, one per slot of the program's longest ring, NS.
    flags: those of `find_maps`, whose state groups may end early, and how many chunks it has to scan; otherwise None.
    """
    descs, tiles, flags, bars, work, strides = given
    full, done = bars
    runs, t = find_runs(work, HV, SEGMENTS), 0
    for i in range(runs[0], runs[1], runs[2]):
        hv, row, start, size, token, chunks, slot, valued = find_work(i, runs, work, flags, HV, PACKED, SEGMENTS)
        c, going = chunks * 0, chunks > 0
        while going:
            s = t % SLOTS
            wait_free(done, t, SLOTS, NS)  # signalled by the state groups, which have left the chunk in this slot
            ended = c * 0 > 0
            if flags is not None:
                ended = end_early(flags[0], full.index(s), c)
            if not ended:
                where = (hv, row, start, size, token + c * C, (slot + c) * HV + hv)
                load_chunk(descs, tiles, full.index(s), s, where, strides, column, valued, t == 0, WIDTH, VALUES)
            c += 1
            t += 1
            going = (c < chunks) & (not ended)
