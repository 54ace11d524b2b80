"""One token of a head in a decoding step: load it, activate it, update the state.

States are transposed, S^T, and their channels are in blocks of X: [BK / X, BV, X]. If channels adjoin in a pool, X of
them are 256 bytes. So 16 threads of a warp share the channels of a value column, and 2 columns are side by side. A sum
over channels is then mostly within threads. In memory a state is addressed as rows of X numbers, [BK / X BV, X], since
versions of Triton spread three axes over threads in different ways.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import strength_of
from flash_delta.kernels.device.gates import channel_log_decay, channel_parameters, head_log_decay, head_parameters

LANES_BITS = tl.constexpr(2048)  # of the channels that 16 threads load at once


@triton.constexpr_function
def block_of(BK, strides, bits):
    """X, for a pool of numbers of so many ``bits``, whose strides are (head, key, value)."""
    return min(BK, LANES_BITS.value // bits) if strides[1] == 1 else BK


@triton.constexpr_function
def halvings_of(strides, bits):
    """How many times a thread's adjoining channels are halved, down to single ones."""
    return (2 if bits == 32 else 3) if strides[1] == 1 else 0


@triton.jit
def channels(BK: tl.constexpr, X: tl.constexpr):
    """The channels in blocks, [BK / X, X]."""
    return tl.arange(0, BK // X)[:, None] * X + tl.arange(0, X)[None, :]


@triton.jit
def in_blocks(rows, BV: tl.constexpr):
    """A state [BK / X, BV, X], from rows of X numbers."""
    X: tl.constexpr = rows.shape[1]
    return tl.reshape(rows, [rows.shape[0] // BV, BV, X])


@triton.jit
def in_rows(S):
    """A state [BK / X, BV, X], as rows of X numbers."""
    return tl.reshape(S, [S.shape[0] * S.shape[1], S.shape[2]])


@triton.jit
def load_numbers(x, strides, unit, head, c, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Loads the numbers of one token and head. Strides are (unit, head, channel). EVEN: all of ``c`` are valid."""
    at = x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + c * strides[2]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=c < WIDTH, other=0.0)


@triton.jit
def load_number(x, strides, unit, head):
    """Loads one number of one token and head. Strides are (unit, head)."""
    return tl.load(x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1])


@triton.jit
def load_token(
    q, k, g, beta, b, t, h, hv, c, K: tl.constexpr, K_EVEN: tl.constexpr, CHANNEL: tl.constexpr
):  # fmt: skip
    """Loads token t without its values. Each tensor is given with its strides, the units to its row, and the units per
    token. The strength comes last: beta, or the gate b."""
    qt = load_numbers(q[0], q[1], q[2] + t * q[3], h, c, K, K_EVEN)  # [BK / X, X]
    kt = load_numbers(k[0], k[1], k[2] + t * k[3], h, c, K, K_EVEN)
    if CHANNEL:
        gt = load_numbers(g[0], g[1], g[2] + t * g[3], hv, c, K, K_EVEN)
    else:
        gt = load_number(g[0], g[1], g[2] + t * g[3], hv)
    if b[0] is None:
        return qt, kt, gt, load_number(beta[0], beta[1], beta[2] + t * beta[3], hv)
    else:
        return qt, kt, gt, load_numbers(b[0], b[1], b[2] + t * b[3], hv, c, K, K_EVEN)


@triton.jit
def load_values(v, w, t, hv, d, V: tl.constexpr, V_EVEN: tl.constexpr):
    """Loads values of token t [BV], and their gates if there is w."""
    vt = load_numbers(v[0], v[1], v[2] + t * v[3], hv, d, V, V_EVEN)
    if w[0] is None:
        return (vt,)
    else:
        return vt, load_numbers(w[0], w[1], w[2] + t * w[3], hv, d, V, V_EVEN)


@triton.jit
def load_gate(
    A_log, dt_bias, hv, c, K: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A head's parameters for `log_decay`."""
    rate, bias = 1.0, 0.0
    if CHANNEL:
        rate, bias = channel_parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    elif RAW_GATE:
        rate, bias = head_parameters(A_log, dt_bias, hv, HAS_BIAS)
    return rate, bias


@triton.jit
def log_decay(
    a, rate, bias, bound, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr
):  # fmt: skip
    if CHANNEL:
        return channel_log_decay(a, rate, bias, bound, 1.0, RAW_GATE, BOUNDED)[:, None, :]
    elif RAW_GATE:
        return head_log_decay(a, rate, bias)
    else:
        return a.to(tl.float32)


@triton.jit
def reciprocal_length(x):
    return tl.rsqrt(tl.sum(tl.sum(x * x, 0), 0) + 1e-6)


@triton.jit
def read_by(S, x, HALVINGS: tl.constexpr):
    """S^T x [BV], from [BK / X, BV, X] and [BK / X, X]."""
    return tl.sum(tl.sum(inner(S, tl.broadcast_to(x[:, None, :], S.shape), None, HALVINGS), 0), 1)


@triton.jit
def halves(x):
    """The even channels, and the odd ones."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))


@triton.jit
def inner(a, b, c, HALVINGS: tl.constexpr):
    """c and the products of a and b, summed over 2^HALVINGS adjoining channels one after the other."""
    if HALVINGS == 0:
        return products(a, b, c)
    else:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        if HALVINGS == 1:
            return products(a1, b1, products(a0, b0, c))
        else:
            a2, a3 = halves(a1)
            b2, b3 = halves(b1)
            a0, a1 = halves(a0)
            b0, b1 = halves(b0)
            if HALVINGS == 2:
                c = products(a1, b1, products(a0, b0, c))
                return products(a3, b3, products(a2, b2, c))
            else:
                c = inner(a1, b1, inner(a0, b0, c, 1), 1)
                return inner(a3, b3, inner(a2, b2, c, 1), 1)


@triton.jit
def products(a, b, c):
    return a * b if c is None else tl.fma(a, b, c)


@triton.jit
def activate(
    token, gate, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, RAW_BETA: tl.constexpr,
    NORM: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    """What a token does to all value columns: its query, key, erase key, strength and decay, and the factors of what is
    read by the key and by the query. ``token``: from `load_token`. ``gate``: from `load_gate`, and then the scale, the
    bound of log decays and the range of beta."""
    rate, bias, scale, bound, beta_range = gate
    q, k, strength = token[0].to(tl.float32), token[1].to(tl.float32), strength_of(token[3], beta_range, RAW_BETA)
    r_k, r_q = 1.0, scale
    if NORM:
        r_k, r_q = reciprocal_length(k), scale * reciprocal_length(q)
    decay = tl.exp(log_decay(token[2], rate, bias, bound, CHANNEL, RAW_GATE, BOUNDED))
    return q, k, k * strength if STRENGTH else k, strength, decay, r_k, r_q


@triton.jit
def advance(last, active, values, RAW_BETA: tl.constexpr, STRENGTH: tl.constexpr, HALVINGS: tl.constexpr):
    """The state after a token, its output [BV], and its record: the key, u [BV] and the decay, as `replay` takes them.
    ``active``: from `activate`; ``values``: from `load_values`."""
    q, k, erase, strength, decay, r_k, r_q = active
    v, S = values[0].to(tl.float32), last.to(tl.float32) * decay
    if STRENGTH:
        u = (v * strength_of(values[1], 1.0, RAW_BETA) - r_k * read_by(S, erase, HALVINGS)) * r_k  # [BV]
    else:
        u = strength * (v - r_k * read_by(S, erase, HALVINGS)) * r_k
    S = written_by(S, k, u)
    return S, r_q * read_by(S, q, HALVINGS), (k, u, decay)


@triton.jit
def written_by(S, k, u):
    """S + k u^T."""
    return tl.fma(tl.broadcast_to(k[:, None, :], S.shape), tl.broadcast_to(u[None, :, None], S.shape), S)


@triton.jit
def replay(last, record, ty: tl.constexpr):
    """The state after a token whose ``record`` `advance` has returned, with the same bits, rounded to ``ty``."""
    return written_by(last.to(tl.float32) * record[2], record[0], record[1]).to(ty).to(tl.float32)
