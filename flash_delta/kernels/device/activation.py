"""A layer's activations inside of kernels: write strengths, convolutions and output norms."""

import triton
import triton.language as tl


@triton.jit
def strength(z, top):
    """``top * sigmoid(z)``."""
    return top / (1.0 + tl.exp(-z))


@triton.jit
def strength_of(z, top, RAW: tl.constexpr):
    """A strength in float32, from its logit if it is RAW."""
    z = z.to(tl.float32)
    if RAW:
        z = strength(z, top)
    return z


@triton.jit
def strength_backward(d, b, top, RAW: tl.constexpr):
    """The gradient of what `strength_of` took, from the gradient of its result b."""
    if RAW:
        d *= b * (1.0 - b / top)
    return d


@triton.jit
def spread(x):
    """Returns the same vector with one element per thread. After a reduction every thread has the elements of a whole
    row, and the compiler would keep this layout. A gather gives up the layout."""
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    """A sigmoid for kernels that are bound by memory. It has fewer instructions than `strength`, whose division and
    exponential also scale numbers that may be subnormal. For sm_90a the short convolution has 1192 instead of 1584."""
    r = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return r * r
