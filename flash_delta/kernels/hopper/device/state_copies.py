"""Copies a state between memory and the registers of its warp group: S^T [64, WIDTH] float32, in parts of 32 keys.

The copy engine moves the parts through the NO buffers of the outputs, 8 KB each. If threads loaded the state
themselves, so many addresses would take the registers that the loop needs.

A state in a ``slot`` of a pool may have 16 bits. The descriptor does not describe slot -1, so a load from there gives
zeros. Callers do not store to slot -1. The test that did so ended in an illegal instruction on an H200 (docs/notes).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_delta.kernels.hopper.device.gluon_compat import barrier, reinterpret, tma_load, tma_store
from flash_delta.kernels.hopper.device.layouts import HALF, NARROW_ROWS, ROW_HALF, ROW_STATE, ROW_TILE, STATE, TILE


@gluon.jit
def part_of(so, desc, m: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """The buffer of part m, with the shape that the part has in memory."""
    shape: gl.constexpr = [64, 32] if V_FIRST else [32, 64]
    if desc.dtype == gl.float32:
        return reinterpret(so.index(m % NO), gl.float32, shape, STATE)
    else:
        return reinterpret(so.index(m % NO), desc.dtype, shape, HALF if V_FIRST else TILE)


@gluon.jit
def box_of(tile, slot, row, column, m: gl.constexpr, V_FIRST: gl.constexpr):
    """Returns where part m is in memory, and its buffer with the axes of the descriptor. A pool's descriptor has three
    axes."""
    r, c = (row + column, 32 * m) if V_FIRST else (row + 32 * m, column)
    if slot is None:
        return (r, c), tile
    else:
        shape: gl.constexpr = [1, 64, 32] if V_FIRST else [1, 32, 64]
        if tile.dtype == gl.float32:
            return (slot, r, c), reinterpret(tile, tile.dtype, shape, ROW_STATE)
        else:
            return (slot, r, c), reinterpret(tile, tile.dtype, shape, ROW_HALF if V_FIRST else ROW_TILE)


@gluon.jit
def fetch(
    desc, slot, row, column, so, bars, m: gl.constexpr, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr
):
    """Asks the copy engine for part m, if there is one."""
    if m < WIDTH // 32:
        bar, tile = bars.index(m % NO), part_of(so, desc, m, V_FIRST, NO)
        mbarrier.expect(bar, 64 * 32 * (4 if desc.dtype == gl.float32 else 2))
        at, box = box_of(tile, slot, row, column, m, V_FIRST)
        tma_load(desc, at, bar, box)


@gluon.jit
def fetched(
    desc, slot, row, column, so, bars, m: gl.constexpr, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr
):
    """Part m of S^T, [64, 32]. It also asks for the part that comes into the same buffer next."""
    mbarrier.wait(bars.index(m % NO), m // NO % 2)  # signalled by the copy engine: part m is there
    tile = part_of(so, desc, m, V_FIRST, NO)
    part = tile.load(NARROW_ROWS) if V_FIRST else tile.permute([1, 0]).load(NARROW_ROWS)
    barrier()  # all warps of this group: they have read part m
    fetch(desc, slot, row, column, so, bars, m + NO, WIDTH, V_FIRST, NO)
    return part.to(gl.float32)


@gluon.jit
def beside(a, b):
    """The columns of a, followed by those of b."""
    return gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def apart(x):
    """The first half of the columns, and the second half."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def beside_all(parts, first: gl.constexpr, COUNT: gl.constexpr):
    if COUNT == 1:
        return parts[first]
    else:
        half: gl.constexpr = COUNT // 2
        return beside(beside_all(parts, first, half), beside_all(parts, first + half, half))


@gluon.jit
def apart_all(x, COUNT: gl.constexpr):
    if COUNT == 1:
        return (x,)
    else:
        left, right = apart(x)
        return apart_all(left, COUNT // 2) + apart_all(right, COUNT // 2)


@gluon.jit
def store_through(tile, box, desc, at, x, TURNED: gl.constexpr):
    """Stores x to memory through the buffer ``tile``, which has to be free. ``box`` is the same buffer with the axes of
    the descriptor. TURNED: x is stored transposed."""
    if TURNED:
        tile.permute([1, 0]).store(x)
    else:
        tile.store(x)
    fence_async_shared()
    barrier()  # all warps of this group: the buffer is full
    tma_store(desc, at, box)


@gluon.jit
def send(desc, x, row, column, so, number, NO: gl.constexpr, TURNED: gl.constexpr):
    """Stores x [64, 64] to memory, through the next of NO buffers. TURNED: x is stored transposed."""
    tma.store_wait(NO - 1)  # the copy engine has read the next buffer
    barrier()  # all warps of this group: none writes earlier
    tile = so.index(number % NO)
    store_through(tile, tile, desc, (row, column), x, TURNED)


@gluon.jit
def ask_for_state(
    desc, slot, row, column, so, bars, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr
):  # fmt: skip
    """Asks for the first parts of the state that `take_state` takes."""
    for m in gl.static_range(NO):
        fetch(desc, slot, row, column, so, bars, m, WIDTH, V_FIRST, NO)


@gluon.jit
def take_state(
    desc, slot, row, column, so, bars, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr, ROWS: gl.constexpr
):
    """The state that `load_state` loads, after `ask_for_state`."""
    parts = ()
    for m in gl.static_range(WIDTH // 32):
        parts += (fetched(desc, slot, row, column, so, bars, m, WIDTH, V_FIRST, NO),)
    return gl.convert_layout(beside_all(parts, 0, WIDTH // 32), ROWS)


@gluon.jit
def load_state(
    desc, slot, row, column, so, bars, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr, ROWS: gl.constexpr
):
    """S^T of the head whose state begins at ``row``: 64 values from ``column`` on. ``slot``: that of a pool, or None.

    Every barrier of ``bars`` goes through an even number of phases. So the next call finds it as this one did. No store
    from ``so`` may be on its way."""
    ask_for_state(desc, slot, row, column, so, bars, WIDTH, V_FIRST, NO)
    return take_state(desc, slot, row, column, so, bars, WIDTH, V_FIRST, NO, ROWS)


@gluon.jit
def store_state(desc, S, slot, row, column, so, WIDTH: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """Stores a state where `load_state` loads it. When the call returns, ``so`` is free."""
    parts = apart_all(S, WIDTH // 32)
    tma.store_wait(0)  # the copy engine has read all buffers
    for m in gl.static_range(WIDTH // 32):
        tma.store_wait(NO - 1)  # the copy engine has read this part's buffer
        barrier()  # all warps of this group: none writes earlier
        part, tile = gl.convert_layout(parts[m], NARROW_ROWS).to(desc.dtype), part_of(so, desc, m, V_FIRST, NO)
        at, box = box_of(tile, slot, row, column, m, V_FIRST)
        store_through(tile, box, desc, at, part, not V_FIRST)
    tma.store_wait(0)
    barrier()  # all warps of this group: ``so`` is free for them, too
