"""A layer's activations inside of kernels: those of gates, write strengths, convolutions and output norms."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x), as max(x, 0) + log(1 + e) with e = e^-|x|. Its relative error is at most 2e-7 plus that of e, even
    if e is very small."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) / e, as the polynomial of degree 8 with the smallest maximal relative error, 3e-8.
    quotient = 0.005232691299170256 * e - 0.029505226761102676
    quotient = quotient * e + 0.07822593301534653
    quotient = quotient * e - 0.13663244247436523
    quotient = quotient * e + 0.19106006622314453
    quotient = quotient * e - 0.2484298199415207
    quotient = quotient * e + 0.3331909775733948
    quotient = quotient * e - 0.4999949336051941
    quotient = quotient * e + 0.9999999403953552
    return tl.maximum(x, 0.0) + e * quotient


@triton.jit
def gate_parameters(A_log, dt_bias, heads, HAS_BIAS: tl.constexpr, known=True):
    """The rate, -e^A_log, and the bias of one or several value heads. Only heads that are ``known`` are read."""
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + heads, mask=known, other=0.0).to(tl.float32)
    return -tl.exp(tl.load(A_log + heads, mask=known, other=0.0).to(tl.float32)), bias


@triton.jit
def log_decay(a, rate, bias):
    """One log decay for all channels of a head, from its raw activation: ``-e^A_log softplus(a + dt_bias)``."""
    return rate * softplus(a.to(tl.float32) + bias)


@triton.jit
def strength(z, top):
    """``top * sigmoid(z)``."""
    return top / (1.0 + tl.exp(-z))


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
