"""Tiles of 16 tokens that wait in shared memory: those of the chunk's first half, which comes last. Registers have no
room for them, and local memory would be far away: the cache has 28 KB beside so much shared memory, and all threads
together would keep 150. Every thread reads what it has written itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.channel_backward.blocks import CHANNELS, K
from flash_delta.kernels.hopper.gluon_compat import reinterpret

LATE = gl.constexpr(2)  # the blocks before that one wait
PLACE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
OWN = gl.constexpr(gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 8, 1], [2, 1, 0]))


@gluon.jit
def place_for(tile, COUNT: gl.constexpr):
    """``tile`` as the place of COUNT tiles, 8 KB each."""
    return reinterpret(tile, gl.float32, [2 * COUNT, 256, 4], PLACE)


@gluon.jit
def park(place, n: gl.constexpr, x):
    """Stores tile n. Its element's row is 16 warp + 8 a + lane // 4, its column 8 b + 2 (lane % 4) + c."""
    x = x.reshape([8, 2, 8, 2, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([2, 256, 4])  # b, the thread, a and c
    place.slice(2 * n, 2, 0).store(gl.convert_layout(x, OWN))


@gluon.jit
def parked(place, n: gl.constexpr):
    x = place.slice(2 * n, 2, 0).load(OWN).reshape([2, 8, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(x.reshape([K, 16]), CHANNELS)
