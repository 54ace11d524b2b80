"""Stage ``step`` on a pool of states: T tokens for every row of a batch, one after the other.

    S~ = e^g S      u = b (v - S~^T k)      S = S~ + k u^T      o = scale S^T q

One program takes BV value columns of one row and value head: grid (B HV V / BV). It reads its part of the row's state
once, and writes it after every token of whom ``write_indices`` has the slot. The state is kept in registers,
transposed, S^T [BV, J, W]: its BK = J W key channels in pieces of W (launch.run_decode).

Between tokens the state has the pool's dtype, written or not, so that it does not matter in how many calls tokens
come. Nor does it matter with which other arguments: products are rounded by themselves or stand in ``fma``, the
compiler contracts none (launch.run_decode), and what the kernel is compiled for does not depend on T (launch.counted).

Indices are what the device says. What is no slot is never an address: loads and stores are masked by ``live``.
"""

import triton
import triton.language as tl

from flash_delta.kernels.triton import channel_gate
from flash_delta.kernels.triton.activation import log_decay, strength


@triton.jit
def load_numbers(x, strides, unit, head, c, WIDTH: tl.constexpr):
    """Of one token and head, as they are; strides: (unit, head, channel)."""
    at = x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + c * strides[2]
    return tl.load(at, mask=c < WIDTH, other=0.0)


@triton.jit
def load_number(x, strides, unit, head):
    """Of one token and head; strides: (unit, head)."""
    return tl.load(x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]).to(tl.float32)


@triton.jit
def load_slot(table, row, column, strides, slots, live):
    """A slot, and whether it is one. Nothing is read where ``live`` is not."""
    slot = tl.load(table + row.to(tl.int64) * strides[0] + column * strides[1], mask=live, other=-1)
    return slot.to(tl.int32), live & (slot >= 0) & (slot < slots)


@triton.jit
def reciprocal_length(x):
    """Of [J, W]."""
    return tl.rsqrt(tl.sum(tl.sum(x * x, 0), 0) + 1e-6)


@triton.jit
def read_by(S, x):
    """S^T x [BV], of [BV, J, W] and [J, W]."""
    return tl.sum(tl.sum(S * x[None, :, :], 1), 1)


NUMBERS = [  # Triton would specialise what is 1 or a multiple of 16, in tuples even if told not to
    "T", "slots", "columns", "first_written", "q_row", "q_token", "k_row", "k_token", "v_row", "v_token", "g_row",
    "g_token", "beta_row", "beta_token", "read_row", "read_column", "accepted_row", "write_row", "write_token",
    "parents_row", "parents_token",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def decode(
    q, k, v, g, beta, A_log, dt_bias, pool, read_indices, write_indices, accepted, parents, o,
    T, slots, columns, first_written, scale, lower_bound, beta_range,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token,
    read_row, read_column, accepted_row, write_row, write_token, parents_row, parents_token,
    q_strides, k_strides, v_strides, g_strides, beta_strides, pool_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """From one batch row and from one token to the next it is ``q_row`` and ``q_token`` units, whose length is
    ``q_strides[0]``; and so on (launch.counted)."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    w, hv, b = program % BLOCKS * BV, program // BLOCKS % HV, program // (BLOCKS * HV)
    h = hv // (HV // H)
    c = tl.arange(0, BK // W)[:, None] * W + tl.arange(0, W)[None, :]  # [J, W]
    d = w + tl.arange(0, BV)
    inside = (d < V)[:, None, None] & (c < K)[None, :, :]
    tile = pool + hv.to(tl.int64) * pool_strides[1]
    tile += d[:, None, None] * pool_strides[3]
    tile += c[None, :, :] * pool_strides[2]

    write_strides = (write_row, write_token)
    column, live = b * 0, b >= 0
    if accepted is not None:
        count = tl.load(accepted + b.to(tl.int64) * accepted_row)
        column, live = (count - 1).to(tl.int32), (count >= 1) & (count <= columns)
    slot, live = load_slot(read_indices, b, column, (read_row, read_column), slots, live)
    first = tl.load(tile + slot.to(tl.int64) * pool_strides[0], mask=inside & live, other=0.0)  # [BV, J, W]
    alive = live.to(tl.int32)  # bit 0: the row; bit t + 1: token t is no padding
    if CHANNEL:
        rate, bias = channel_gate.parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)

    last = first
    for t in range(T):
        parent = t - 1
        if parents is not None:
            parent = tl.load(parents + b.to(tl.int64) * parents_row + t * parents_token)
            known = (parent >= -1) & (parent < t)
            parent = tl.where(known, parent, 30).to(tl.int32)  # whose bit no token has
            slot, live = load_slot(write_indices, b, parent, write_strides, slots, known & (parent >= 0))
            last = tl.load(tile + slot.to(tl.int64) * pool_strides[0], mask=inside & live, other=0.0)
            last = tl.where(parent < 0, first, last)
        live = ((alive >> (parent + 1)) & 1) != 0
        if write_indices is not None:
            slot, live = load_slot(write_indices, b, t, write_strides, slots, live)

        kt = load_numbers(k, k_strides, b * k_row + t * k_token, h, c, K).to(tl.float32)  # [J, W]
        qt = load_numbers(q, q_strides, b * q_row + t * q_token, h, c, K).to(tl.float32)
        vt = load_numbers(v, v_strides, b * v_row + t * v_token, hv, d, V).to(tl.float32)
        bt = load_number(beta, beta_strides, b * beta_row + t * beta_token, hv)
        if RAW_BETA:
            bt = strength(bt, beta_range)
        r_k, r_q = 1.0, scale
        if NORM:
            r_k, r_q = reciprocal_length(kt), scale * reciprocal_length(qt)
        if CHANNEL:
            a = load_numbers(g, g_strides, b * g_row + t * g_token, hv, c, K)
            decay = tl.exp(channel_gate.log_decay(a, rate, bias, lower_bound, 1.0, RAW_GATE, BOUNDED))[None, :, :]
        else:
            a = load_number(g, g_strides, b * g_row + t * g_token, hv)
            decay = tl.exp(log_decay(a, A_log, dt_bias, hv, HAS_BIAS) if RAW_GATE else a)

        S = last.to(tl.float32) * decay
        u = bt * (vt - r_k * read_by(S, kt)) * r_k  # [BV]
        S = tl.fma(tl.broadcast_to(kt[None, :, :], S.shape), tl.broadcast_to(u[:, None, None], S.shape), S)
        ot = tl.where(live, r_q * read_by(S, qt), 0.0)
        tl.store(o + ((b * T + t) * HV + hv).to(tl.int64) * V + d, ot.to(o.dtype.element_ty), mask=d < V)
        last = S.to(pool.dtype.element_ty)
        if write_indices is not None:
            at = tile + slot.to(tl.int64) * pool_strides[0]
            tl.store(at, last, mask=inside & live & (t >= first_written))
        alive |= live.to(tl.int32) << (t + 1)
        if parents is not None:
            tl.debug_barrier()  # a later token's threads load what this one's stored
