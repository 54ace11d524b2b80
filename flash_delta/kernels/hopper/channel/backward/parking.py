"""Tiles of 16 tokens that wait in shared memory, since the chunk's first blocks come last. There are not enough
registers for them, and local memory would be slow. Besides so much shared memory the cache has only 28 KB, and all
threads together would keep 150 KB there. Every thread reads what it has written itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.channel.backward.blocks import CHANNELS, K
from flash_delta.kernels.hopper.device.gluon_compat import reinterpret

PLACE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
OWN = gl.constexpr(gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 8, 1], [2, 1, 0]))


@gluon.jit
def place(parking, n: gl.constexpr):
    """Place n of eight, 8 KB each: four in the first tile of ``parking``, two in the second, one in each other."""
    if n < 4:
        return reinterpret(parking[0], gl.float32, [8, 256, 4], PLACE).slice(2 * n, 2, 0)
    elif n < 6:
        return reinterpret(parking[1], gl.float32, [4, 256, 4], PLACE).slice(2 * n - 8, 2, 0)
    else:
        return reinterpret(parking[n - 4], gl.float32, [2, 256, 4], PLACE)


@gluon.jit
def park(parking, n: gl.constexpr, x):
    """Stores x in place n. An element's row is 16 warp + 8 a + lane // 4, its column 8 b + 2 (lane % 4) + c."""
    x = x.reshape([8, 2, 8, 2, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([2, 256, 4])  # b, the thread, a and c
    place(parking, n).store(gl.convert_layout(x, OWN))


@gluon.jit
def parked(parking, n: gl.constexpr):
    x = place(parking, n).load(OWN).reshape([2, 8, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(x.reshape([K, 16]), CHANNELS)
