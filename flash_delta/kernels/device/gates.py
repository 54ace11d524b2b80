"""Every formula of a gate that kernels use, in Triton and in Gluon: log decays, and their gradients.

With rate = e^A_log the log decay of an activation a is

    per head                    -rate softplus(a + dt_bias)
    per channel                 max(-rate softplus(a + dt_bias), LEAST_DECAY)
    per channel, with a bound   bound sigmoid(rate (a + dt_bias))
    given per channel           max(a, bound), or max(a, LEAST_DECAY) without a bound

reference/activation.py has the same in PyTorch. Functions in Triton count in nats, or in a unit that the kernel asks
for. Functions in Gluon count in bits.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BITS = gl.constexpr(1.4426950408889634)  # log2(e)
LEAST_DECAY = gl.constexpr(-128.0)  # nats per token: e^-128 is 0 in float32, and sums over a chunk stay small


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
def head_parameters(A_log, dt_bias, heads, HAS_BIAS: tl.constexpr, known=True):
    """The rate, -e^A_log, and the bias of one or several value heads. Only heads that are ``known`` are read."""
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + heads, mask=known, other=0.0).to(tl.float32)
    return -tl.exp(tl.load(A_log + heads, mask=known, other=0.0).to(tl.float32)), bias


@triton.jit
def head_log_decay(a, rate, bias):
    """One log decay for all channels of a head, from its raw activation: ``-e^A_log softplus(a + dt_bias)``."""
    return rate * softplus(a.to(tl.float32) + bias)


@triton.jit
def head_gate_backward(d, a, rate):
    """The gradient of activations ``a`` with their bias, from that of log decays. `head_parameters` has ``rate``."""
    return d * (rate / (1.0 + tl.exp(-a)))


@triton.jit
def channel_parameters(
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
def channel_log_decay(a, rate, bias, bound, unit, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """The log decay for ``a`` of any shape, in units of 1 / ``unit`` nats:

    given                      max(a, LEAST_DECAY)
    given, BOUNDED             max(a, bound)
    RAW_GATE                   max(-rate softplus(a + bias), LEAST_DECAY)
    RAW_GATE, BOUNDED          bound sigmoid(rate (a + bias))
    """
    if not RAW_GATE:
        return tl.maximum(a.to(tl.float32), bound if BOUNDED else LEAST_DECAY) * unit
    if not BOUNDED:
        return tl.maximum(-rate * softplus(a.to(tl.float32) + bias), LEAST_DECAY) * unit
    if a.dtype == tl.float32:
        return bound * unit / (1.0 + tl.exp2(rate * -BITS * (a + bias)))
    else:  # the square of a reciprocal root needs no division, and one instruction adds the square; the error is 4e-7
        inverse = -1.0 / (bound * unit)
        root = tl.rsqrt(inverse + inverse * tl.exp2(a.to(tl.float32) * (rate * -BITS) + bias * (rate * -BITS)))
        return root * root * -1.0  # not -x, which would be a separate instruction, 0 - x


@triton.jit
def channel_gate_backward(dg, decay, a, rate, bias, live, BOUNDED: tl.constexpr):
    """The gradients of activations ``a`` and, per element, of A_log, from the gradient ``dg`` of the log decay."""
    x, dg = a.to(tl.float32) + bias, tl.where(live, dg, 0.0)
    if BOUNDED:  # 1 - sigmoid would lose all digits near 0
        da = dg * (decay * rate) / (1.0 + tl.exp(tl.minimum(rate * x, 80.0)))
        return da, da * x
    else:
        return -dg * rate / (1.0 + tl.exp(tl.minimum(-x, 80.0))), dg * decay


@triton.jit
def clamp_backward(dg, a, bound):
    """The gradient of a log decay that was given with a bound. It is 0 below the bound."""
    return tl.where(a.to(tl.float32) < bound, 0.0, dg)


@triton.jit
def store_sums(dA_log, ddt_bias, at, dA, dbias, some, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores one chunk's parts of the gradients of A_log and dt_bias, if the call has these parameters."""
    if HAS_A:
        tl.store(dA_log + at, dA, mask=some)
    if HAS_BIAS:
        tl.store(ddt_bias + at, dbias, mask=some)


@gluon.jit
def softplus_bits(y):
    """``log2(1 + 2^y)``. The relative error is at most 1e-5."""
    e = gl.exp2(gl.abs(y) * -1.0)
    # log2(1 + e) / e, as the polynomial of degree 5 with the smallest maximal relative error.
    quotient = -0.03443590895077392 * e + 0.14603291342569902
    quotient = quotient * e - 0.3030362483814795
    quotient = quotient * e + 0.4691740937644456
    quotient = quotient * e - 0.7204261714173823
    quotient = quotient * e + 1.4426829200530695
    return gl.maximum(y, 0.0) + e * quotient


@gluon.jit
def gate_constants(A, bias, least, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The numbers that `log_decays` needs: the factor of activations, the number added to them, a number for the bound,
    and ``least``. If there is a bound, ``least`` is the bound."""
    rate = gl.maximum(gl.exp2(A * BITS), 1e-30) * -BITS  # never 0: its product with the activation -inf has to be inf
    inverse, shift = 0.0, 0.0
    if BOUNDED:
        inverse = -1.0 / (least * BITS)
    if RAW_GATE:
        shift = bias[None, :].expand_dims(1) * (rate if BOUNDED else BITS)
    return rate, shift, inverse, least


@gluon.jit
def log_decays(x, constants, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """Log decays in bits, from activations, or from log decays as given in nats."""
    rate, shift, inverse, least = constants
    if not RAW_GATE:
        return gl.maximum(x, least) * BITS
    elif BOUNDED:
        # The square of a reciprocal root needs no division, and one instruction adds the square.
        root = gl.rsqrt(inverse + inverse * gl.exp2(x * rate + shift))
        return root * root * -1.0
    else:
        return gl.maximum(softplus_bits(x * BITS + shift) * (rate * (1.0 / BITS)), least * BITS)


@gluon.jit
def log_decays_of_rows(a, live, rate, bias, bound, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """Log decays in bits. They are 0 for tokens after the sequence's end."""
    if not RAW_GATE:  # zeros were loaded after the end
        return gl.maximum(a, bound if BOUNDED else LEAST_DECAY) * BITS
    elif BOUNDED:
        inverse, turned = -1.0 / (bound * BITS), rate * -BITS
        root = gl.rsqrt(inverse + inverse * gl.exp2(a * turned[:, None] + (bias * turned)[:, None]))
        return gl.where(live, root * root * -1.0, 0.0)
    else:
        softplus = softplus_bits(a * BITS + (bias * BITS)[:, None])
        return gl.where(live, gl.maximum(softplus * (rate * -1.0)[:, None], LEAST_DECAY * BITS), 0.0)


@gluon.jit
def gate_backward_of_rows(d, decay, a, live, rate, bias, BOUNDED: gl.constexpr):
    """The gradients of activations and, per element, of A_log, from that of log decays, ``d``. ``decay``: in bits."""
    x, d, decay = a + bias[:, None], gl.where(live, d, 0.0), decay * (1.0 / BITS)
    if BOUNDED:
        up = gl.exp2(gl.minimum(x * rate[:, None], 80.0) * BITS)
        da = d * decay * rate[:, None] / (up + 1.0)
        return da, da * x
    else:
        up = gl.exp2(gl.minimum(x * -1.0, 80.0) * BITS)
        return d * (rate * -1.0)[:, None] / (up + 1.0), d * decay
