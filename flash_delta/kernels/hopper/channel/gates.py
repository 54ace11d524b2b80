"""Sums of log decays per channel, which `prepare` and `gate_role` make of what the copy engine has loaded.

device/gates.py has the formulas. Given log decays below a promised bound count as the bound. Without a bound there is a
least log decay, and lower ones count as that: LEAST_DECAY in `prepare`, FADED_DECAY in `channel_loop`. Here log decays
are in bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.device.gates import BITS, LEAST_DECAY, gate_constants, log_decays
from flash_delta.kernels.hopper.channel.scores import OWN, TOKENS, take
from flash_delta.kernels.hopper.device.gluon_compat import barrier

FADED_DECAY = gl.constexpr(-17.3)  # nats per token, 25 bits: float32 rounds away what is smaller by that much
MIDDLE = gl.constexpr(55.0)  # bits, of gates without a bound (steep.py)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def rest_living(sg, left):
    """Gives tokens from ``left`` on the activation -inf, whose log decay is 0."""
    for h in gl.static_range(sg.shape[0] // 32):
        i = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, TOKENS))[:, None]
        half = sg.slice(32 * h, 32, 0)
        half.store(gl.where(i < left, half.load(TOKENS).to(gl.float32), float("-inf")).to(sg.dtype))
    barrier()  # all warps of the program, or of the gate group: they read what others have written


@gluon.jit
def sum_gates(sg, totals, A, bias, bound, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The sums of log decays from each block's start, for both halves, and ``middle``, which is added to all of them.
    ``totals`` gets the sums of whole blocks, without ``middle``."""
    constants = gate_constants(A, bias, bound if BOUNDED else LEAST_DECAY, RAW_GATE, BOUNDED)
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    middle = MIDDLE
    if BOUNDED:
        middle = bound * BITS * -8.0
    sums = ()
    for h in gl.static_range(2):
        decay = log_decays(take(sg, h), constants, RAW_GATE, BOUNDED)
        s = gl.associative_scan(gl.where(m == 0, decay + middle, decay), 1, add)
        last = gl.sum(gl.where(m == 15, s, -0.0), 1)  # to add -0.0 is no instruction
        totals.slice(2 * h, 2, 0).store(last - middle)
        sums += (s,)
    return sums, middle
