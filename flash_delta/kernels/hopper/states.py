"""The way of a state between memory and the registers of its warp group: S^T [64, K] float32, in four quarters of 32
keys, by way of the NO buffers of the outputs (8 KB each), since 64 addresses would take the registers of a loop."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_delta.kernels.hopper.layouts import NARROW_ROWS, STATE, WIDE_ROWS
from flash_delta.kernels.hopper.names import barrier, reinterpret, tma_load, tma_store


@gluon.jit
def quarter(so, m: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """The buffer of quarter m, with rows as they are in memory."""
    shape: gl.constexpr = [64, 32] if V_FIRST else [32, 64]
    return reinterpret(so.index(m % NO), gl.float32, shape, STATE)


@gluon.jit
def fetch(desc, row, column, so, bars, m: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr):
    if m < 4:
        bar = bars.index(m % NO)
        mbarrier.expect(bar, 64 * 32 * 4)
        at = [row + column, 32 * m] if V_FIRST else [row + 32 * m, column]
        tma_load(desc, at, bar, quarter(so, m, V_FIRST, NO))


@gluon.jit
def fetched(desc, row, column, so, bars, m: gl.constexpr, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """Quarter m of S^T, [64, 32]; another one may come into its place."""
    mbarrier.wait(bars.index(m % NO), m // NO % 2)
    tile = quarter(so, m, V_FIRST, NO)
    part = tile.load(NARROW_ROWS) if V_FIRST else tile.permute([1, 0]).load(NARROW_ROWS)
    barrier()
    fetch(desc, row, column, so, bars, m + NO, V_FIRST, NO)
    return part


@gluon.jit
def beside(a, b):
    """Columns of a, then those of b."""
    return gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def apart(x):
    """The first half of the columns, and the second."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def load_state(desc, row, column, so, bars, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """Of the head whose state begins at ``row``, the value columns from ``column`` on. Each of ``bars`` goes through an
    even number of phases; nothing may be on its way out of ``so``."""
    for m in gl.static_range(NO):
        fetch(desc, row, column, so, bars, m, V_FIRST, NO)
    a = fetched(desc, row, column, so, bars, 0, V_FIRST, NO)
    b = fetched(desc, row, column, so, bars, 1, V_FIRST, NO)
    c = fetched(desc, row, column, so, bars, 2, V_FIRST, NO)
    d = fetched(desc, row, column, so, bars, 3, V_FIRST, NO)
    return gl.convert_layout(beside(beside(a, b), beside(c, d)), WIDE_ROWS)


@gluon.jit
def store_state(desc, S, row, column, so, V_FIRST: gl.constexpr, NO: gl.constexpr):
    """The way back; when it returns, ``so`` is free."""
    left, right = apart(S)
    parts = apart(left) + apart(right)
    tma.store_wait(0)
    for m in gl.static_range(4):
        tma.store_wait(NO - 1)
        barrier()
        part, tile = gl.convert_layout(parts[m], NARROW_ROWS), quarter(so, m, V_FIRST, NO)
        if V_FIRST:
            tile.store(part)
        else:
            tile.permute([1, 0]).store(part)
        fence_async_shared()
        barrier()
        tma_store(desc, [row + column, 32 * m] if V_FIRST else [row + 32 * m, column], tile)
    tma.store_wait(0)
    barrier()
