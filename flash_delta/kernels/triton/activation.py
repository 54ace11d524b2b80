"""The raw activations of a layer, inside a kernel: gate and write strength."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x), to the last digit also where e^x is tiny: a plain log would round 1 + e^x first."""
    e = tl.exp(tl.minimum(x, 30.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 30.0, x, log1p)


@triton.jit
def log_decay(a, A_log, dt_bias, head, HAS_BIAS: tl.constexpr):
    """``-e^A_log softplus(a + dt_bias)`` of one head's tokens."""
    x = a
    if HAS_BIAS:
        x += tl.load(dt_bias + head).to(tl.float32)
    return -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x)


@triton.jit
def strength(z, top):
    """``top * sigmoid(z)``."""
    return top / (1.0 + tl.exp(-z))
