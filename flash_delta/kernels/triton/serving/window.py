"""The short convolution before a decoding step.

    y_t = silu(bias + sum_{i<W} weight[i] x_{t-(W-1)+i})

A window [C, 4] holds the last four inputs of C channels, the latest last, so W is 4 at most. CONV: the taps W; the
inputs L that slots hold, W - 1 or more and 4 at most; the pool's strides of (channel, input). What slots do not hold is
0, and no convolution reads it. Channels are those from ``start`` on.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import silu, spread


@triton.jit
def place(pool, slot, slot_stride, start, c, WIDTH: tl.constexpr, CONV: tl.constexpr):
    """Where a window lies in a slot, and which of it."""
    i = CONV[1] - 4 + tl.arange(0, 4)
    at = pool + slot.to(tl.int64) * slot_stride + (start + c).to(tl.int64)[:, None] * CONV[2] + i[None, :] * CONV[3]
    return at, (c < WIDTH)[:, None] & (i >= 0)[None, :]


@triton.jit
def load_window(pool, slot, slot_stride, start, c, WIDTH: tl.constexpr, live, CONV: tl.constexpr):
    at, inside = place(pool, slot, slot_stride, start, c, WIDTH, CONV)
    return tl.load(at, mask=inside & live, other=0.0)


@triton.jit
def store_window(window, pool, slot, slot_stride, start, c, WIDTH: tl.constexpr, live, CONV: tl.constexpr):
    at, inside = place(pool, slot, slot_stride, start, c, WIDTH, CONV)
    tl.store(at, window, mask=inside & live)


@triton.jit
def push(window, x):
    """The window with ``x`` after it."""
    i = tl.broadcast_to(tl.arange(0, 4)[None, :], window.shape)
    return tl.where(i == 3, x[:, None], tl.gather(window, tl.minimum(i + 1, 3), 1))


@triton.jit
def convolve(window, weight, bias, start, c, WIDTH: tl.constexpr, CONV: tl.constexpr):
    """Of the window's latest input, in float32."""
    i, inside = CONV[0] - 4 + tl.arange(0, 4), c < WIDTH
    at = weight + (start + c)[:, None] * CONV[0] + i[None, :]
    w = tl.load(at, mask=inside[:, None] & (i >= 0)[None, :], other=0.0)
    y = tl.sum(window.to(tl.float32) * w.to(tl.float32), 1)
    if bias is not None:
        y += tl.load(bias + start + c, mask=inside, other=0.0).to(tl.float32)
    return spread(silu(y))
