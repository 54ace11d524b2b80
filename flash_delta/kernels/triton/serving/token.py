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
    q, k, v, g, beta, b, w, t, h, hv, c, d, K: tl.constexpr, K_EVEN: tl.constexpr, V: tl.constexpr,
    V_EVEN: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Loads token t. Each tensor is given with its strides, the units to its row, and the units per token. Strengths
    come last: beta, or the gates b and w."""
    qt = load_numbers(q[0], q[1], q[2] + t * q[3], h, c, K, K_EVEN)  # [BK / X, X]
    kt = load_numbers(k[0], k[1], k[2] + t * k[3], h, c, K, K_EVEN)
    vt = load_numbers(v[0], v[1], v[2] + t * v[3], hv, d, V, V_EVEN)  # [BV]
    if CHANNEL:
        gt = load_numbers(g[0], g[1], g[2] + t * g[3], hv, c, K, K_EVEN)
    else:
        gt = load_number(g[0], g[1], g[2] + t * g[3], hv)
    if b[0] is None:
        return qt, kt, vt, gt, load_number(beta[0], beta[1], beta[2] + t * beta[3], hv)
    else:
        bt = load_numbers(b[0], b[1], b[2] + t * b[3], hv, c, K, K_EVEN)
        return qt, kt, vt, gt, bt, load_numbers(w[0], w[1], w[2] + t * w[3], hv, d, V, V_EVEN)


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
def read_by(S, x):
    """S^T x [BV], from [BK / X, BV, X] and [BK / X, X]."""
    return tl.sum(tl.sum(S * x[:, None, :], 0), 1)


@triton.jit
def advance(
    last, token, rate, bias, scale, bound, beta_range, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    """The state after a token, its output [BV], and its record: the key, u [BV] and the decay, as `replay` takes them.
    ``token``: from `load_token`."""
    q, k, v, a, b = token[0], token[1], token[2], token[3], token[4]
    k, q, v = k.to(tl.float32), q.to(tl.float32), v.to(tl.float32)
    if STRENGTH:
        erase, v = k * strength_of(b, beta_range, RAW_BETA), v * strength_of(token[5], 1.0, RAW_BETA)
    else:
        b = strength_of(b, beta_range, RAW_BETA)
    r_k, r_q = 1.0, scale
    if NORM:
        r_k, r_q = reciprocal_length(k), scale * reciprocal_length(q)
    decay = tl.exp(log_decay(a, rate, bias, bound, CHANNEL, RAW_GATE, BOUNDED))
    S = last.to(tl.float32) * decay
    u = (v - r_k * read_by(S, erase)) * r_k if STRENGTH else b * (v - r_k * read_by(S, k)) * r_k  # [BV]
    S = written_by(S, k, u)
    return S, r_q * read_by(S, q), (k, u, decay)


@triton.jit
def written_by(S, k, u):
    """S + k u^T."""
    return tl.fma(tl.broadcast_to(k[:, None, :], S.shape), tl.broadcast_to(u[None, :, None], S.shape), S)


@triton.jit
def replay(last, record, ty: tl.constexpr):
    """The state after a token whose ``record`` `advance` has returned, with the same bits, rounded to ``ty``."""
    return written_by(last.to(tl.float32) * record[2], record[0], record[1]).to(ty).to(tl.float32)
