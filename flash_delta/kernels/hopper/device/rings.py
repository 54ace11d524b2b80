"""The rings of tiles in shared memory, which the copy engine fills, and their barriers. Roles share them.

A ring has a few slots, and chunk t of a program uses slot t % slots. Every slot has two barriers. One is completed when
a chunk's tiles have arrived. The other, ``done``, is completed when all readers have finished with them.

With several updates of the state per token (STEPS, `Problem.steps`) a chunk still has 64 rows of k. What is there once
per token, q, o and g, is in the first row of its token. In the other rows q is 0, nothing decays, and o is left out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.kernels.hopper.device.gluon_compat import reinterpret, tma_load
from flash_delta.kernels.hopper.device.layouts import BOX, FLOAT_BOX, RAGGED, STEP_BOX, C


@gluon.jit
def rate(sr, s, row: gl.constexpr):
    """One of the eight rows of slot s, [1, 64], in the order of `rates`."""
    return sr.index(2 * s + row // 4).slice(row % 4 * C, C, 1)


@gluon.jit
def as_box(tile, dtype: gl.constexpr, COLUMNS: gl.constexpr, STEPS: gl.constexpr = 1):
    """A tile with the axes of its descriptor (`boxes.ragged`)."""
    if STEPS == 1:
        layout: gl.constexpr = FLOAT_BOX if dtype == gl.float32 else BOX
        return reinterpret(tile, dtype, [1, 1, tile.shape[0], COLUMNS], layout)
    else:
        return reinterpret(tile, dtype, [1, 1, tile.shape[0] // STEPS, STEPS, COLUMNS], STEP_BOX)


@gluon.jit
def place_of(end, left, column, STEPS: gl.constexpr = 1):
    """Where a tile is, for its descriptor. ``end``: the row after its sequence's last. ``left``: RAGGED, less the rows
    from the tile's first one to that end. The copy engine leaves out what is after the end, and with STEPS the rows
    that are not the first of their token."""
    if STEPS == 1:
        return (RAGGED, end, left, column)
    else:  # a quotient of signed numbers would take registers that loading roles do not have
        BITS: gl.constexpr = 1 + (STEPS > 2) + (STEPS > 4) + (STEPS > 8) + (STEPS > 16) + (STEPS > 32)
        return (RAGGED, end >> BITS, RAGGED - RAGGED // STEPS + (left >> BITS), 0, column)


@gluon.jit
def sees(i, j, STEPS: gl.constexpr):
    """Whether the query in row i reads what row j writes. It reads all updates of its own token, of which i is the
    first."""
    if STEPS == 1:
        return i >= j
    else:
        return (i | (STEPS - 1)) >= j


@gluon.jit
def load_box(desc, row, length, token, column, bar, tile, COLUMNS: gl.constexpr, STEPS: gl.constexpr = 1):
    """Starts a copy of a tile's rows, from a sequence that begins at ``row``. Rows after its end are zeros."""
    at = place_of(row + length, RAGGED - length + token, column, STEPS)
    tma_load(desc, at, bar, as_box(tile, desc.dtype, COLUMNS, STEPS))


@gluon.jit
def load_rates(desc, index, bar, sr, s):
    """Starts a copy of the two lines of ``rates`` of one chunk and head."""
    tma_load(desc, [2 * index, 0], bar, sr.index(2 * s))
    tma_load(desc, [2 * index + 1, 0], bar, sr.index(2 * s + 1))


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Makes barriers. Each is completed by so many ``arrivals`` and by all bytes that it was told to expect."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def invalidate(bars):
    if bars is not None:
        COUNT: gl.constexpr = bars.shape[0]
        for i in gl.static_range(COUNT):
            mbarrier.invalidate(bars.index(i))


@gluon.jit
def end_barriers(rings, first=None, second=None, third=None):
    """Ends the barriers of a program, after its roles: everything that `barriers` has made for it.

    This also keeps the barriers' memory from other uses until the program ends. Without it, the compiler gives the
    memory of a barrier to a tile after the barrier's last use. The hardware keeps a copy of each barrier that has not
    been invalidated. When another process gets the GPU in the middle of a kernel, it writes that copy over the tile."""
    for m in gl.static_range(len(rings)):
        invalidate(rings[m])
    invalidate(first)
    invalidate(second)
    invalidate(third)


@gluon.jit
def wait_free(done, t, SLOTS: gl.constexpr, NS: gl.constexpr):
    """Waits until the slot for chunk t is free in a ring of SLOTS. It is free when ``done`` says that the state groups
    have finished with chunk t - SLOTS, which was in this slot. ``done`` has a barrier for each slot of the longest
    ring, NS."""
    before = t + (NS - SLOTS)  # chunk t - SLOTS, one round of the longest ring later
    mbarrier.wait(done.index(before % NS), ((before // NS) & 1) ^ 1)  # signalled by every state group, per chunk
