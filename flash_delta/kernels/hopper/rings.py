"""What roles share: the ring of tiles that the copy engine fills, its barriers, and its lines of rates."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.kernels.hopper.gluon_compat import reinterpret, tma_load
from flash_delta.kernels.hopper.layouts import BOX, RAGGED, C


@gluon.jit
def rate(sr, s, row: gl.constexpr):
    """[1, 64], as `rates` numbers them."""
    return sr.index(2 * s + row // 4).slice(row % 4 * C, C, 1)


@gluon.jit
def load_box(desc, row, length, token, column, bar, tile, COLUMNS: gl.constexpr):
    box = reinterpret(tile, desc.dtype, [1, 1, C, COLUMNS], BOX)
    tma_load(desc, [RAGGED, row + length, RAGGED - length + token, column], bar, box)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars
