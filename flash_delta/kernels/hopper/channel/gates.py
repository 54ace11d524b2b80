"""Log decays per channel, which `prepare` and `gate_role` make of what the copy engine has loaded.

With raw activations they are ``lower_bound sigmoid(e^A_log (a + dt_bias))``, or without a bound
``-e^A_log softplus(a + dt_bias)``. Given log decays below a promised bound count as the bound. Without a bound there is
a least log decay, and lower ones count as that: LEAST in `prepare`, FADED in `channel_loop`. Here log decays are in
bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.channel.scores import OWN, TOKENS, take
from flash_delta.kernels.hopper.device.gluon_compat import barrier

BITS = gl.constexpr(1.4426950408889634)  # log2(e)
LEAST = gl.constexpr(-128.0)  # nats per token: e^-128 is 0 in float32, and sums over a chunk stay small
FADED = gl.constexpr(-17.3)  # nats per token, 25 bits: float32 rounds away what is smaller by that much
MIDDLE = gl.constexpr(55.0)  # bits, of gates without a bound (steep.py)


@gluon.jit
def add(a, b):
    return a + b


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
def rest_living(sg, left):
    """Gives tokens from ``left`` on the activation -inf, whose log decay is 0."""
    for h in gl.static_range(sg.shape[0] // 32):
        i = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, TOKENS))[:, None]
        half = sg.slice(32 * h, 32, 0)
        half.store(gl.where(i < left, half.load(TOKENS).to(gl.float32), float("-inf")).to(sg.dtype))
    barrier()  # all warps of the program, or of the gate group: they read what others have written


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
def sum_gates(sg, totals, A, bias, lower_bound, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The sums of log decays from each block's start, for both halves, and ``middle``, which is added to all of them.
    ``totals`` gets the sums of whole blocks, without ``middle``."""
    constants = gate_constants(A, bias, lower_bound if BOUNDED else LEAST, RAW_GATE, BOUNDED)
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    middle = MIDDLE
    if BOUNDED:
        middle = lower_bound * BITS * -8.0
    sums = ()
    for h in gl.static_range(2):
        decay = log_decays(take(sg, h), constants, RAW_GATE, BOUNDED)
        s = gl.associative_scan(gl.where(m == 0, decay + middle, decay), 1, add)
        last = gl.sum(gl.where(m == 15, s, -0.0), 1)  # to add -0.0 is no instruction
        totals.slice(2 * h, 2, 0).store(last - middle)
        sums += (s,)
    return sums, middle
