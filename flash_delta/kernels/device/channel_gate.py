"""The log decay per key channel and token, given or computed from its raw activation (Kimi Delta Attention)."""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import softplus

BITS = tl.constexpr(1.4426950408889634)  # log2(e): kernels count in bits
LEAST = tl.constexpr(-128.0)  # nats per token: e^-128 is 0 in float32, and sums over a chunk stay small


@triton.jit
def parameters(
    A_log, dt_bias, hv, c, K: tl.constexpr, RAW_GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The rate, e^A_log, and the bias of channels ``c`` of one value head, [W]; 1 and 0 if there is none.

    The rate is never 0, because 0 times -inf, the activation of a missing token, would be NaN.
    """
    rate, bias = tl.full(c.shape, 1.0, tl.float32), tl.zeros(c.shape, tl.float32)
    if RAW_GATE:
        if HAS_A:
            rate *= tl.maximum(tl.exp(tl.load(A_log + hv).to(tl.float32)), 1e-30)
        if HAS_BIAS:
            bias = tl.load(dt_bias + hv * K + c, mask=c < K, other=0.0).to(tl.float32)
    return rate, bias


@triton.jit
def living(a, live, RAW_GATE: tl.constexpr):
    """The activations. Missing tokens get the activation whose log decay is 0."""
    return tl.where(live, a, float("-inf") if RAW_GATE else 0.0)


@triton.jit
def log_decay(a, rate, bias, lower_bound, unit, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """The log decay for ``a`` of any shape, in units of 1 / ``unit`` nats:

    given                      max(a, LEAST)
    given, BOUNDED             max(a, lower_bound)
    RAW_GATE                   max(-rate softplus(a + bias), LEAST)
    RAW_GATE, BOUNDED          lower_bound sigmoid(rate (a + bias))
    """
    if not RAW_GATE:
        return tl.maximum(a.to(tl.float32), lower_bound if BOUNDED else LEAST) * unit
    if not BOUNDED:
        return tl.maximum(-rate * softplus(a.to(tl.float32) + bias), LEAST) * unit
    if a.dtype == tl.float32:
        return lower_bound * unit / (1.0 + tl.exp2(rate * -BITS * (a + bias)))
    else:  # the square of a reciprocal root needs no division, and one instruction adds the square; the error is 4e-7
        inverse = -1.0 / (lower_bound * unit)
        root = tl.rsqrt(inverse + inverse * tl.exp2(a.to(tl.float32) * (rate * -BITS) + bias * (rate * -BITS)))
        return root * root * -1.0  # not -x, which would be a separate instruction, 0 - x


@triton.jit
def gate_backward(dg, decay, a, rate, bias, live, BOUNDED: tl.constexpr):
    """The gradients of activations ``a`` and, per element, of A_log, from the gradient ``dg`` of the log decay."""
    x, dg = a.to(tl.float32) + bias, tl.where(live, dg, 0.0)
    if BOUNDED:  # 1 - sigmoid would lose all digits near 0
        da = dg * (decay * rate) / (1.0 + tl.exp(tl.minimum(rate * x, 80.0)))
        return da, da * x
    else:
        return -dg * rate / (1.0 + tl.exp(tl.minimum(-x, 80.0))), dg * decay


@triton.jit
def clamp_backward(dg, a, lower_bound):
    """The gradient of a log decay that was given with a bound. It is 0 below the bound."""
    return tl.where(a.to(tl.float32) < lower_bound, 0.0, dg)


@triton.jit
def store_sums(dA_log, ddt_bias, at, dA, dbias, some, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores one chunk's parts of the gradients of A_log and dt_bias, if the call has these parameters."""
    if HAS_A:
        tl.store(dA_log + at, dA, mask=some)
    if HAS_BIAS:
        tl.store(ddt_bias + at, dbias, mask=some)
