"""Strengths, and sums of log decays per channel, which `prepare` and the loop make of what they have loaded.

device/gates.py has the formulas. Given log decays below a promised bound count as the bound. Without a bound there is a
least log decay, and lower ones count as that: LEAST_DECAY in `prepare`, FADED_DECAY in `channel_loop`. Here log decays
are in bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.device.gates import BITS, LEAST_DECAY, gate_constants, log_decays
from flash_delta.kernels.hopper.channel.scores import OWN, TOKENS, K, take
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.layouts import THREADS, C

SUMS = gl.constexpr(gl.SliceLayout(1, OWN))  # [2, 128]: a number for each block of a half, and channel
FADED_DECAY = gl.constexpr(-17.3)  # nats per token, 25 bits: float32 rounds away what is smaller by that much
WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [.., 128], eight neighbours in a thread
MIDDLE = gl.constexpr(55.0)  # bits, of gates without a bound (steep.py)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def strength_of(z, top, RAW: gl.constexpr):
    """A strength in float32, from its logit if it is RAW."""
    z = z.to(gl.float32)
    if RAW:
        z = top / (1.0 + gl.exp2(z * -BITS))
    return z


@gluon.jit
def strengths_of(z, top, RAW: gl.constexpr):
    """`strength_of` for many numbers. It takes fewer instructions, since subnormal numbers count as 0."""
    z = z.to(gl.float32)
    if RAW:
        code: gl.constexpr = """{
            .reg .f32 e;
            ex2.approx.ftz.f32 e, $1;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
        }"""
        z = gl.inline_asm_elementwise(code, "=f,f", [z * -BITS], gl.float32, True, 1) * top
    return z


@gluon.jit
def strength_back(d, b, top, RAW: gl.constexpr):
    """The gradient of what `strength_of` took, from the gradient of its result b."""
    if RAW:
        d = d * (b * (1.0 - b / top))
    return d


@gluon.jit
def parameters(chunk, given, HV):
    """A_log, the channels' biases, and beta as given of a chunk. They are loaded early, because loads take long."""
    hv, i = chunk.item % HV, gl.arange(0, C, layout=THREADS)
    c = gl.arange(0, K, layout=gl.SliceLayout(0, SUMS))
    A, bias = (hv * 0).to(gl.float32), gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, SUMS))
    b = gl.full([C], 1.0, gl.float32, THREADS)
    if given.A_log is not None:
        A = gl.load(given.A_log + hv).to(gl.float32)
    if given.dt_bias is not None:
        bias = gl.load(given.dt_bias + hv * K + c).to(gl.float32)
    if given.beta is not None:
        of_token, of_head = given.beta_strides
        token = (chunk.start + chunk.first + i).to(gl.int64)
        at = chunk.row.to(gl.int64) * given.beta_batch + token * of_token + hv * of_head
        b = gl.load(given.beta + at, mask=chunk.first + i < chunk.size, other=0.0).to(gl.float32)
    return A, bias, b


@gluon.jit
def load_erasing(chunk, erasing, h: gl.constexpr, HV):
    """The erase gates of half h of a chunk as given."""
    of_token, of_head = erasing.strides
    a = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, OWN)))[:, None, None]
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    c = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]
    row = (chunk.row * erasing.batch + chunk.start + chunk.first).to(gl.int64) * of_token
    i = 32 * h + 16 * a + m
    some = (i < chunk.size - chunk.first) & (c < K)
    return gl.load(erasing.b + (row + chunk.item % HV * of_head) + (i * of_token + c), mask=some, other=0.0)


@gluon.jit
def write_values(chunk, values, HV, T, RAW: gl.constexpr):
    """Writes w . v of a chunk. ``values``: of v, w and W the addresses, then as in `Erasing`."""
    v, w, W, v_batch, w_batch, v_strides, w_strides = values
    c = gl.arange(0, K, layout=gl.SliceLayout(0, WORDS))[None, :]
    token, hv = chunk.start + chunk.first, chunk.item % HV
    for h in gl.static_range(2):
        i = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS))[:, None]
        some = (i < chunk.size - chunk.first) & (c < K)
        of_v = (chunk.row * v_batch + token).to(gl.int64) * v_strides[0] + hv * v_strides[1]
        of_w = (chunk.row * w_batch + token).to(gl.int64) * w_strides[0] + hv * w_strides[1]
        x = gl.load(v + of_v + (i * v_strides[0] + c), mask=some, other=0.0).to(gl.float32)
        z = gl.load(w + of_w + (i * w_strides[0] + c), mask=some, other=0.0)
        of_W = ((chunk.row * T + token).to(gl.int64) * HV + hv) * K
        gl.store(W + of_W + (i * (HV * K) + c), (x * strengths_of(z, 1.0, RAW)).to(W.dtype.element_ty), mask=some)


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
