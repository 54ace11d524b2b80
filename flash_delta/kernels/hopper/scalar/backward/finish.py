"""What is left to do after `scan_gradients`. `sum_heads` sums the gradients dq and dk of a key head over its value
heads, and takes them back through norms: grid (slots, H, 2). `finish` makes the gradients of gates and b from the lines
that `scan_gradients` has written: grid (slots, HV). They are two kernels because `finish` needs few registers, and
`sum_heads` many.

    dg_t = sum over j < t <= i of X_ij + sum over i >= t of reads_i + sum over i < t of writes_i + gamma <S0, dS1>
    db_i = <dV_i, U_i> / b_i^2, minus (sum over j < i of L_ij <dV_i, U_j>) / b_i if |b_i| < TINY

X_ij is what the pair of tokens (i, j) adds to the gradient of every gate between them. With STEPS only the first row of
a token has a gate. Chunks after the last sequence
get zeros, also in dv. In other chunks `scan_gradients` has written dv.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import count_slots, enter_chunk, load_tile, rows_of, store_row, store_tile
from flash_delta.kernels.hopper.plans.tiles import FINISH, SUM_HEADS
from flash_delta.kernels.hopper.scalar.backward.memory import (
    ERASED,
    FIXED,
    GROUP,
    PAIRS,
    READS,
    TAKEN,
    THROUGH,
    WRITES,
    Gates,
    GradientLines,
    count_lines,
)
from flash_delta.kernels.hopper.scalar.forward.rates import TINY
from flash_delta.kernels.runtime.arguments import PER_TOKEN, batch, launch_rule, strides, tokens
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.triton.backward.gradients import norm_backward, store_gate
from flash_delta.problem import Inputs


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def sum_heads(
    q, k, norms, head_dq, head_dk, cu_seqlens, dq, dk, N, T, q_strides, k_strides, H, HV, GROUP: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, h, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    norm = norms
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * (2 * C)
    if tl.program_id(2) == 0:
        sum_of(head_dq, q, q_strides, norm, dq, row, token, stop, empty, h, T, H, HV, GROUP, K, C, NORM, STEPS)
    else:
        if NORM:
            norm += C
        sum_of(head_dk, k, k_strides, norm, dk, row, token, stop, empty, h, T, H, HV, GROUP, K, C, NORM, 1)


@triton.jit
def sum_of(
    parts, x, x_strides, norm, out, row, token, stop, empty, h, T,
    H, HV, GROUP: tl.constexpr, K: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of x for one chunk and key head. STEPS: the rows of the chunk for each row of x."""
    T = (T // STEPS).to(tl.int64)
    head_strides, out_strides = (T * HV * K, HV * K, K, 1), (T * H * K, H * K, K, 1)
    z = tl.zeros([C, K], tl.float32)
    if not empty:
        for member in tl.static_range(GROUP):
            rows = rows_of(parts, head_strides, row, h * GROUP + member)
            z += load_tile(rows, head_strides, token, stop, 0, K, C, K, False, STEPS).to(tl.float32)
        if NORM:
            own = load_tile(rows_of(x, x_strides, row, h), x_strides, token, stop, 0, K, C, K, False, STEPS)
            z = norm_backward(z, own.to(tl.float32), tl.load(norm + tl.arange(0, C)))
    rows, z = rows_of(out, out_strides, row, h), z.to(out.dtype.element_ty)
    store_tile(rows, out_strides, z, token, stop, 0, K, C, K, False, STEPS)


@triton.jit
def beta_gradient(line, rate, beta_top, C: tl.constexpr, RAW_BETA: tl.constexpr):
    b = tl.load(rate + 3 * C)
    divisor = tl.where(b == 0.0, 1.0, b)  # b is 0 only after the end of a sequence
    db = tl.load(line + ERASED * C) / (divisor * divisor)
    db -= tl.where(tl.abs(b) < TINY, tl.load(line + TAKEN * C) / divisor, 0.0)  # there U is b R (rates.py)
    if RAW_BETA:
        db *= b * (1.0 - b / beta_top)
    return db


@triton.jit
def gate_gradient(line, rate, V: tl.constexpr, C: tl.constexpr):
    """The gradient of the log decays."""
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
    carrying = i[:, None] <= i[None, :]  # [t, i]: gate t acts on what row i reads, and not on what it writes
    sums = tl.sum(tl.where(carrying, reads[None, :], writes[None, :]), 1)
    return sums + pairs + tl.load(rate - i + 7 * C) * tl.sum(through)


@triton.jit(do_not_specialize=["N", "T", "g_batch", "HV"], do_not_specialize_on_alignment=PER_TOKEN)
def finish(
    g, A_log, dt_bias, rates, decays, lines, cu_seqlens, dv, dg, dbeta, dA_log, ddt_bias, N, T, beta_top, g_batch,
    g_token, g_head, HV, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr,
    RAW_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    STEPS: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, hv, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    i, head = tl.arange(0, C), slot.to(tl.int64) * HV + hv
    strides = (T.to(tl.int64) * HV, HV, 1)
    line, rate = lines + head * (LINES * C) + i, rates + head * (8 * C) + i
    if empty:
        none, v_strides = tl.zeros([C], tl.float32), (T.to(tl.int64) * HV * V, HV * V, V, 1)
        rows, nothing = rows_of(dv, v_strides, row, hv), tl.zeros([C, V], dv.dtype.element_ty)
        store_tile(rows, v_strides, nothing, token, stop, 0, V, C, V)
        if HAS_BETA:
            store_row(rows_of(dbeta, strides, row, hv), strides, none, token, stop, C)
        if GATE:
            g_strides = ((T // STEPS).to(tl.int64) * HV, HV, 1)
            store_row(rows_of(dg, g_strides, row, hv), g_strides, none, token, stop, C, STEPS)
        if RAW_GATE:
            tl.store(dA_log + head, 0.0)
        if HAS_BIAS:
            tl.store(ddt_bias + head, 0.0)
        return
    if HAS_BETA:
        db = beta_gradient(line, rate, beta_top, C, RAW_BETA)
        store_row(rows_of(dbeta, strides, row, hv), strides, db, token, stop, C)
    if GATE:
        log_decays = rate  # any pointer: it is read only with a raw gate
        if RAW_GATE:
            log_decays = decays + head * C
        given = (g, A_log, dt_bias, log_decays, dg, dA_log, ddt_bias)
        all_strides = (g_batch, g_token, g_head)
        sums = gate_gradient(line, rate, V, C)
        store_gate(sums, given, row, hv, head, token, stop, T, all_strides, HV, C, RAW_GATE, HAS_BIAS, STEPS)


def run_finish(c: Draft, gates: Gates, norms: Layout | None, parts: GradientLines, d: Inputs) -> None:
    p, x, slots = c.p, c.x, count_slots(c.p)
    pointers = (
        x.g, x.A_log, x.dt_bias, *gates, parts.lines, x.cu_seqlens, d.v, d.g, d.beta, d.A_log,
        d.dt_bias,
    )  # fmt: skip
    scalars = p.N, p.T, p.beta_range, batch(x.g), *tokens(x.g)
    launch_rule(c, finish, pointers, (slots, p.HV, 1), FINISH, *scalars, LINES=count_lines(p.V), follows=True)
    pointers = (x.q, x.k, norms, parts.dq, parts.dk, x.cu_seqlens, d.q, d.k)
    launch_rule(c, sum_heads, pointers, (slots, p.H, 2), SUM_HEADS, p.N, p.T, strides(x.q), strides(x.k), follows=True)
