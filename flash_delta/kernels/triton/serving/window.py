"""The short convolution before a decoding step.

    y_t = silu(bias + sum_{i<W} weight[i] x_{t-(W-1)+i})

A window is a list of the last four inputs of C channels, those from ``start`` on, the latest input last. Each input is
a vector [C]. So W is at most 4. Inputs that windows in slots do not have are 0, and no convolution reads them. CONV is
a tuple:

    0       the taps W
    1       the inputs L of a window in a slot, W - 1 to 4
    2       the pool's stride of channels
    3       whether the inputs of a channel adjoin
    4       whether slots are rolling

A rolling slot holds the inputs before a draft, and then those of its tokens. L is W - 1, and the window that begins at
input n ends with the input of token n.

Threads read what is contiguous in memory. If that is the inputs of a channel, four of them are read at once, as a
matrix [C, 4].
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import silu, spread


@triton.jit
def columns_of(matrix):
    """The four columns of a matrix [C, 4]."""
    even, odd = tl.split(tl.reshape(matrix, [matrix.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return [first, second, third, fourth]


@triton.jit
def matrix_of(columns):
    even, odd = tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3])
    return tl.reshape(tl.join(even, odd), [columns[0].shape[0], 4])


@triton.jit
def place(windows, slot, n, start, c, CONV: tl.constexpr):
    """The addresses of the first of four inputs of window ``n`` in a slot. ``windows``: their pool, its strides of
    slots and inputs, and the stride of a slot's windows. If that is None, there is one window, unless the slot is
    rolling."""
    at = windows[0] + slot.to(tl.int64) * windows[1]
    if windows[3] is not None:
        at += n * windows[3]
    first = CONV[1] - 4
    if CONV[4]:
        first += n
    return at + (start + c).to(tl.int64) * CONV[2] + first * windows[2]


@triton.jit
def load_window(windows, slot, n, start, c, width, live, CONV: tl.constexpr):
    at, inside = place(windows, slot, n, start, c, CONV), (c < width) & live
    if CONV[3]:
        i = tl.arange(0, 4)[None, :]
        return columns_of(tl.load(at[:, None] + i, mask=inside[:, None] & (i >= 4 - CONV[1]), other=0.0))
    window = []
    for i in tl.static_range(4):
        window += [tl.load(at + i * windows[2], mask=inside & (i >= 4 - CONV[1]), other=0.0)]
    return window


@triton.jit
def store_window(window, windows, slot, n, start, c, width, live, CONV: tl.constexpr):
    at, inside = place(windows, slot, n, start, c, CONV), (c < width) & live
    before = (n == 0) if CONV[4] else True  # in a rolling slot later tokens find the first three inputs there
    if CONV[3]:
        i = tl.arange(0, 4)[None, :]
        tl.store(at[:, None] + i, matrix_of(window), mask=inside[:, None] & (i >= 4 - CONV[1]) & ((i == 3) | before))
    else:
        for i in tl.static_range(4):
            tl.store(at + i * windows[2], window[i], mask=inside & (i >= 4 - CONV[1]) & ((i == 3) | before))


@triton.jit
def window_after(parent, first, windows, slot, start, c, width, live, CONV: tl.constexpr):
    """The window that token ``parent`` of a tree left in its slot; for -1, the row's ``first`` window."""
    window, chosen = load_window(windows, slot, parent, start, c, width, live, CONV), []
    for i in tl.static_range(4):
        chosen += [tl.where(parent < 0, first[i], window[i])]
    return chosen


@triton.jit
def push(window, x):
    """The window with ``x`` added, rounded as it will be stored."""
    return [window[1], window[2], window[3], x.to(window[0].dtype)]


@triton.jit
def load_taps(weight, start, c, width, CONV: tl.constexpr):
    """The weights of a window's inputs."""
    i = CONV[0] - 4 + tl.arange(0, 4)[None, :]
    at = weight + (start + c)[:, None] * CONV[0] + i
    return columns_of(tl.load(at, mask=(c < width)[:, None] & (i >= 0), other=0.0))


@triton.jit
def convolve(window, taps, base):
    """The convolution at the window's latest input, in float32."""
    y = window[0].to(tl.float32) * taps[0].to(tl.float32)
    for i in tl.static_range(1, 4):
        y += window[i].to(tl.float32) * taps[i].to(tl.float32)
    if base is not None:
        y += base.to(tl.float32)
    return spread(silu(y))
