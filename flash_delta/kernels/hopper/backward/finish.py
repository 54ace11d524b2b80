"""What is left after `walk_back`. The gradients dq and dk of a key head are summed over its value heads, and go back
through norms. The gradients of gates and b are made of the lines that `walk_back` has left.

    dg_t = sum over j < t <= i of X_ij + sum over i >= t of reads_i + sum over i < t of writes_i + gamma <S0, dS1>
    db_i = <dV_i, U_i> / b_i^2, and if b_i is tiny less (sum over j < i of L_ij <dV_i, U_j>) / b_i

X_ij is what the pair of tokens (i, j) has of any gate between them. Grid (slots, H, 3): dq, dk, and the rest. Chunks
after the last sequence get zeros, in dv too, which `walk_back` writes of others.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device.chunk import count_slots, enter_chunk, load_tile, rows_of, store_row, store_tile
from flash_delta.kernels.hopper.backward.memory import (
    ERASED,
    FIXED,
    GROUP,
    PAIRS,
    READS,
    TAKEN,
    THROUGH,
    WRITES,
    Parts,
    count_lines,
)
from flash_delta.kernels.hopper.forward.rates import TINY
from flash_delta.kernels.hopper.tiles import FINISH
from flash_delta.kernels.runtime.arguments import batch, launch_rule, strides, tokens
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Walked
from flash_delta.kernels.triton.backward.gradients import norm_backward, store_gate
from flash_delta.problem import Inputs


@triton.jit
def sum_heads(
    parts, x, x_strides, norm, out, row, token, stop, empty, h, T,
    HV: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of x, of a chunk and key head."""
    head_strides, out_strides = (T.to(tl.int64) * HV * K, HV * K, K, 1), (T.to(tl.int64) * H * K, H * K, K, 1)
    z = tl.zeros([C, K], tl.float32)
    if not empty:
        for member in tl.static_range(HV // H):
            rows = rows_of(parts, head_strides, row, h * (HV // H) + member)
            z += load_tile(rows, head_strides, token, stop, 0, K, C, K).to(tl.float32)
        if NORM:
            own = load_tile(rows_of(x, x_strides, row, h), x_strides, token, stop, 0, K, C, K).to(tl.float32)
            z = norm_backward(z, own, tl.load(norm + tl.arange(0, C)))
    store_tile(rows_of(out, out_strides, row, h), out_strides, z.to(out.dtype.element_ty), token, stop, 0, K, C, K)


@triton.jit
def beta_gradient(line, rate, beta_top, C: tl.constexpr, RAW_BETA: tl.constexpr):
    b = tl.load(rate + 3 * C)
    divisor = tl.where(b == 0.0, 1.0, b)  # b is 0 after the end of a sequence only
    db = tl.load(line + ERASED * C) / (divisor * divisor)
    db -= tl.where(tl.abs(b) < TINY, tl.load(line + TAKEN * C) / divisor, 0.0)  # there U is b R (rates.py)
    if RAW_BETA:
        db *= b * (1.0 - b / beta_top)
    return db


@triton.jit
def gate_gradient(line, rate, V: tl.constexpr, C: tl.constexpr):
    """Of the log decays."""
    i = tl.arange(0, C)
    pairs, writes, through = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for warp in tl.static_range(4):
        pairs += tl.load(line + (PAIRS + warp) * C)
    for group in tl.static_range(V // 64):
        own = line + (FIXED + group * GROUP) * C
        for warp in tl.static_range(4):
            writes += tl.load(own + (WRITES + warp) * C)
        through += tl.load(own + THROUGH * C)
    reads = tl.load(line + READS * C)
    carrying = i[:, None] <= i[None, :]  # [t, i]: what row i reads carries gate t, what it writes does not
    sums = tl.sum(tl.where(carrying, reads[None, :], writes[None, :]), 1)
    return sums + pairs + tl.load(rate + 7 * C) * tl.sum(through)


@triton.jit(do_not_specialize=["N", "T", "g_batch"])
def finish(
    q, k, g, A_log, dt_bias, rates, decays, norms, head_dq, head_dk, lines, cu_seqlens, dq, dk, dv, dg, dbeta,
    dA_log, ddt_bias, N, T, beta_top, q_strides, k_strides, g_batch, g_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    GATE: tl.constexpr, RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    NORM: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, h, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    part = tl.program_id(2)
    norm = norms
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * (3 * C)
    if part == 0:
        sum_heads(head_dq, q, q_strides, norm, dq, row, token, stop, empty, h, T, HV, H, K, C, NORM)
    elif part == 1:
        if NORM:
            norm += C
        sum_heads(head_dk, k, k_strides, norm, dk, row, token, stop, empty, h, T, HV, H, K, C, NORM)
    else:
        i = tl.arange(0, C)
        for member in range(HV // H):
            hv = h * (HV // H) + member
            head = slot.to(tl.int64) * HV + hv
            line, rate = lines + head * (LINES * C) + i, rates + head * (8 * C) + i
            if empty:
                strides = (T.to(tl.int64) * HV * V, HV * V, V, 1)
                nothing = tl.zeros([C, V], dv.dtype.element_ty)
                store_tile(rows_of(dv, strides, row, hv), strides, nothing, token, stop, 0, V, C, V)
            strides = (T.to(tl.int64) * HV, HV, 1)
            if HAS_BETA:
                db = tl.zeros([C], tl.float32)
                if not empty:
                    db = beta_gradient(line, rate, beta_top, C, RAW_BETA)
                store_row(rows_of(dbeta, strides, row, hv), strides, db, token, stop, C)
            if GATE:
                if empty:
                    store_row(rows_of(dg, strides, row, hv), strides, tl.zeros([C], tl.float32), token, stop, C)
                    if RAW_GATE:
                        tl.store(dA_log + head, 0.0)
                    if HAS_BIAS:
                        tl.store(ddt_bias + head, 0.0)
                else:
                    sums, log_decays = gate_gradient(line, rate, V, C), decays
                    if RAW_GATE:
                        log_decays = decays + head * C
                    given = (g, A_log, dt_bias, log_decays, dg, dA_log, ddt_bias)
                    g_all = (g_batch, g_strides[0], g_strides[1])
                    store_gate(sums, given, row, hv, head, token, stop, T, g_all, HV, C, RAW_GATE, HAS_BIAS)


def run_finish(
    c: Call, walked: Walked, parts: Parts, d: Inputs, dA_log: Tensor | None, ddt_bias: Tensor | None
) -> None:
    p, x = c.p, c.x
    pointers = (
        x.q, x.k, x.g, x.A_log, x.dt_bias, *walked[1:], *parts, x.cu_seqlens, d.q, d.k, d.v, d.g, d.beta, dA_log,
        ddt_bias,
    )  # fmt: skip
    scalars = p.N, p.T, p.beta_range, strides(x.q), strides(x.k), batch(x.g), tokens(x.g)
    grid = (count_slots(p), p.H, 3)
    launch_rule(c, finish, pointers, grid, FINISH, *scalars, LINES=count_lines(p.V), follows=True)
