"""Items of work of the loop: a sequence and a value head each. On a pool the sequences are those that `rates` lists
(prompt_list.py): those that `decode` does not run and that are no padding, with the slots of their states."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.layouts import C
from flash_delta.kernels.hopper.segments.bounds import extent


@gluon.jit
def count_items(items, pool, HV: gl.constexpr):
    """How many items of work there are. On a pool `rates` has counted them (prompt_list.py), and they may not be for
    this launch."""
    if pool is None:
        return items
    else:
        walks, least, most = pool[0], pool[1], pool[2]
        gdc_wait()
        count = gl.load(walks)
        return gl.where((count >= least) & (count <= most), count * HV, 0)


@gluon.jit
def bounds(item, cu_seqlens, pool, T, HV: gl.constexpr, PACKED: gl.constexpr):
    """Of an item of work: its sequence and value head, the sequence's first token and its length, in its batch row."""
    n, hv = item // HV, item % HV
    if pool is not None:
        n = gl.load(pool[0] + 3 * n + 1)
    start, stop = extent(n, cu_seqlens, T, PACKED)
    return n, hv, start, stop - start


@gluon.jit
def ends(item, pool, HV: gl.constexpr):
    """On a pool, the slots of its first state and of its last one; -1: none."""
    at = pool[0] + 3 * (item // HV) + 2
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def first_slot(n, start, T, PACKED: gl.constexpr):
    """Of a sequence's chunks, as in device/chunk.py."""
    slot = n * ((T + C - 1) // C)
    if PACKED:
        slot = start // C + n
    return slot


@gluon.jit
def checkpoint(pool, n, tokens, length):
    """The slot of the state of sequence n after so many ``tokens``; -1 where there is none."""
    _, _, _, table, slots, columns, interval, row, column = pool
    slot = n * 0 - 1
    if (tokens % interval == 0) & (tokens <= length) & (tokens // interval <= columns):
        index = gl.load(table + n.to(gl.int64) * row + (tokens // interval - 1) * column)
        if (index >= 0) & (index < slots):
            slot = index.to(gl.int32)
    return slot
