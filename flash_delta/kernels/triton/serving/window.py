"""The short convolution before a decoding step.

    y_t = silu(bias + sum_{i<W} weight[i] x_{t-(W-1)+i})

A window [C, 4] holds the last four inputs of C channels, those from ``start`` on, the latest input last. So W is at
most 4. Inputs that windows in slots do not have are 0, and no convolution reads them. CONV is a tuple:

    0       the taps W
    1       the inputs L of a window in a slot, W - 1 to 4
    2, 3    the pool's strides of (channel, input)
    4       whether slots are rolling

A rolling slot holds the inputs before a draft, and then those of its tokens. L is W - 1, and the window that begins at
input n ends with the input of token n.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import silu, spread


@triton.jit
def place(windows, slot, n, start, c, width, CONV: tl.constexpr):
    """The addresses of window ``n`` in a slot, and which of its numbers exist. ``windows``: their pool, its stride of
    slots, and the stride of a slot's windows. If that is None, there is one window, unless the slot is rolling."""
    i = CONV[1] - 4 + tl.arange(0, 4)
    inside = (c < width)[:, None] & (i >= 0)[None, :]
    if CONV[4]:
        i += n
    at = windows[0] + slot.to(tl.int64) * windows[1]
    if windows[2] is not None:
        at += n * windows[2]
    at = at + (start + c).to(tl.int64)[:, None] * CONV[2] + i[None, :] * CONV[3]
    return at, inside


@triton.jit
def load_window(windows, slot, n, start, c, width, live, CONV: tl.constexpr):
    at, inside = place(windows, slot, n, start, c, width, CONV)
    return tl.load(at, mask=inside & live, other=0.0)


@triton.jit
def store_window(window, windows, slot, n, start, c, width, live, CONV: tl.constexpr):
    at, inside = place(windows, slot, n, start, c, width, CONV)
    if CONV[4]:  # the others were written with the token before
        inside = inside & ((tl.arange(0, 4) == 3) | (n == 0))[None, :]
    tl.store(at, window, mask=inside & live)


@triton.jit
def window_after(parent, first, windows, slot, start, c, width, live, CONV: tl.constexpr):
    """For a tree: the window that token ``parent`` left in its slot, or for -1 the row's ``first`` window."""
    window = load_window(windows, slot, parent, start, c, width, live, CONV)
    return tl.where(parent < 0, first, window)


@triton.jit
def push(window, x):
    """The window with ``x`` added, rounded as it will be stored."""
    i = tl.broadcast_to(tl.arange(0, 4)[None, :], window.shape)
    return tl.where(i == 3, x.to(window.dtype)[:, None], tl.gather(window, tl.minimum(i + 1, 3), 1))


@triton.jit
def convolve(window, weight, bias, start, c, width, CONV: tl.constexpr):
    """The convolution at the window's latest input, in float32."""
    i, inside = CONV[0] - 4 + tl.arange(0, 4), c < width
    at = weight + (start + c)[:, None] * CONV[0] + i[None, :]
    w = tl.load(at, mask=inside[:, None] & (i >= 0)[None, :], other=0.0)
    y = tl.sum(window.to(tl.float32) * w.to(tl.float32), 1)
    if bias is not None:
        y += tl.load(bias + start + c, mask=inside, other=0.0).to(tl.float32)
    return spread(silu(y))
