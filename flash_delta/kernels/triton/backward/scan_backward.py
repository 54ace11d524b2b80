"""Scans the state's gradient from chunk to chunk, right to left, as ``scan`` scans the state.

    dU~ = X dS1 + Y^T dO        dV = b . dU~
    dS0 = gamma dS1 + (scale e^G . q)^T dO - (e^H . p)^T dV

With a decay per channel, where `scan` computes U itself, dU~ = A^T X + X with X = Kd dS1 + P^T dO, since A lacks its
diagonal (solve.py). Then the kernel scans and writes dS divided by ``unit`` (arguments.py).

Writes dS1, the gradient of the state at every chunk's end, ``[slots, HV, V'', K']`` (workspace.py), dU~
``[slots, HV, C, V']`` and finally the gradient of the initial state. dS^T [BV, K] stays in registers. The grid is
(V / BV, HV, N).

RECOMPUTE: as many programs before these run `scan` again and write what was not saved. Neither scan needs the results
of the other, and each mostly waits for its own products. So both together take little longer than one.

In SEGMENTS (segments.py) the grid has slots of segments instead of N. A segment starts from ``dfinal[slot]``, the
gradient that comes from the right, and `scan` starts from ``initial_state[slot]``. Before that, a launch with ENDS
computes D, from which `compose` makes these gradients: dS at the start of every segment except a sequence's first, as
if 0 came from the right, or ``dfinal`` into a sequence's last segment. It writes D to ``dinitial[slot]``, nothing else.
"""

from typing import Any

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import (
    follow,
    lead,
    load_block,
    load_tile,
    matrix,
    pitch,
    rows_of,
    store_tile,
    whole_rows,
)
from flash_delta.kernels.runtime.arguments import columns, launch_rule, state_unit, states, strides, strides_if
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Channels, Factors, Residual, Solved, StateGradients
from flash_delta.kernels.triton.forward.products import load_dither, times_inverse
from flash_delta.kernels.triton.forward.scan import find_tokens, load_rates, load_state, scan, store_state
from flash_delta.kernels.triton.forward.scan_launches import copies, has_logits, maps, readers
from flash_delta.kernels.triton.tiles import scan_tiles


@triton.jit(do_not_specialize=["N", "T", "length", "HV"])
def scan_backward(
    q, p, v, w_gate, do, cu_seqlens, A, X, Y, rates, gammas, initial_state, dfinal, states, R, U, dstates, dU, dinitial,
    N, T, length, unit, q_strides, p_strides, v_strides, w_strides, do_strides, initial_strides, dfinal_strides,
    dinitial_strides, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PACKED: tl.constexpr, ERASE: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    REFLECTS: tl.constexpr, RECOMPUTE: tl.constexpr, SEGMENTS: tl.constexpr, ENDS: tl.constexpr, CHANNEL: tl.constexpr,
    RAW_W: tl.constexpr, STEPS: tl.constexpr, TMA: tl.constexpr, GIVEN_TMA: tl.constexpr, OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    z, hv, w = tl.program_id(2), tl.program_id(1), tl.program_id(0) * BV
    if RECOMPUTE:
        scans = tl.num_programs(2) // 2 if SEGMENTS else N
        if z < scans:
            scan(
                q, p, v, w_gate, cu_seqlens, A, X, Y, rates, gammas, initial_state, None, None, states, R, U,
                None, None, None, None, None, N, T, length, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                q_strides, p_strides, v_strides, w_strides, initial_strides, initial_strides,
                HV, GROUP, K, BK, V, BV, C, PACKED, 0, ERASE, INITIAL and not SEGMENTS, False, SEGMENTS, False, True,
                CHANNEL, RAW_W, STEPS, TMA, GIVEN_TMA, OVERLAP, PRECISION,
            )  # fmt: skip
            return
        z -= scans
    h = hv // GROUP
    n, row, start, stop, slot, number, last = find_tokens(z, length, cu_seqlens, N, T, C, PACKED, SEGMENTS)
    i, c, d = tl.arange(0, C), tl.arange(0, BK), w + tl.arange(0, BV)
    ty: tl.constexpr = q.dtype.element_ty
    head = slot.to(tl.int64) * HV + hv
    chunks = (stop - start + C - 1) // C
    if SEGMENTS:
        chunks = tl.where(n < N, chunks, 0)
    rows = chunks * (HV * C)
    KP: tl.constexpr = pitch(K)
    VP: tl.constexpr = pitch(V)
    ROWS: tl.constexpr = whole_rows(V)
    DITHERED: tl.constexpr = ERASE and REFLECTS and not CHANNEL and ty == tl.bfloat16  # as in factor
    k_matrix, v_matrix, c_matrix = (0, KP, 0, 1), (0, VP, 0, 1), (0, C, 0, 1)
    Xs = matrix(X + head * C * KP, k_matrix, rows, KP, C, BK, TMA)
    Ys = matrix(Y + head * C * C, c_matrix, rows, C, C, C, TMA)
    if not ENDS:
        dSs = matrix(dstates + head * ROWS * KP, k_matrix, chunks * (HV * ROWS), KP, BV, BK, TMA)
        dUs = matrix(dU + head * C * VP, v_matrix, rows, VP, C, BV, TMA)
    if CHANNEL:
        As = matrix(A + head * C * C, c_matrix, rows, C, C, C, TMA)
    dos = matrix(rows_of(do, do_strides, row, hv), do_strides, stop, V, C, BV, GIVEN_TMA and STEPS == 1)
    q_rows, p_rows, q_stop = rows_of(q, q_strides, row, h), rows_of(p, p_strides, row, h), stop
    KEYS: tl.constexpr = KP if CHANNEL else K  # as in scan
    KEYS_TMA: tl.constexpr = TMA if CHANNEL else GIVEN_TMA
    if CHANNEL:
        q_rows, p_rows, q_stop = q + head * C * KP, p + head * C * KP, rows
        q_strides, p_strides = k_matrix, k_matrix
    qs = matrix(q_rows, q_strides, q_stop, KEYS, C, BK, KEYS_TMA and STEPS == 1)
    if ERASE:
        ps = matrix(p_rows, p_strides, q_stop, KEYS, C, BK, KEYS_TMA)
    dS = tl.zeros([BV, BK], tl.float32)
    if FINAL:
        stored = last & (n < N) if ENDS else True
        dS = load_state(dfinal, dfinal_strides, n, hv, d, c, V, K, stored)
    follow(OVERLAP)
    if SEGMENTS and not ENDS:  # `compose` has written it
        dS = load_block(dfinal + (z.to(tl.int64) * HV + hv) * V * K, w, 0, V, K, BV, BK)
    if CHANNEL:
        dS *= 1.0 / unit
    e_q, e_p, b, gamma = load_rates(rates, gammas, head + (chunks - 1) * HV, i, c, chunks, C, K, CHANNEL)
    for back in range(chunks):
        j = chunks - 1 - back
        token, at = start + j * C, j * (HV * C)
        q_token = at if CHANNEL else token
        dO = tl.trans(load_tile(dos, do_strides, token, stop, w, V, C, BV, GIVEN_TMA and STEPS == 1, STEPS))
        y = load_tile(Ys, c_matrix, at, rows, 0, C, C, C, TMA)
        x = load_tile(Xs, k_matrix, at, rows, 0, KP, C, BK, TMA)
        qq = load_tile(qs, q_strides, q_token, q_stop, 0, KEYS, C, BK, KEYS_TMA and STEPS == 1, STEPS)
        s = dS.to(ty)
        if not ENDS:
            by = load_dither(rates, head + j * HV, C, DITHERED)
            store_tile(dSs, k_matrix, s, j * (HV * ROWS) + w, j * (HV * ROWS) + ROWS, 0, KP, BV, BK, TMA)
        of_q, of_p = e_q, e_p * b
        if CHANNEL:
            of_q, of_p = of_q * (1.0 / unit), of_p * (1.0 / unit)
            lam = tl.dot(s, tl.trans(x), input_precision=PRECISION) * (e_p * unit)[None, :]
            lam = tl.dot(dO, y, lam, input_precision=PRECISION)
        else:
            lam = tl.dot(dO, y, input_precision=PRECISION)
            lam = tl.dot(s, tl.trans(x), lam, input_precision=PRECISION)  # [BV, C], dU~
        dS *= gamma
        reads = (dO * of_q[None, :]).to(ty)
        if CHANNEL:
            a = load_tile(As, c_matrix, at, rows, 0, C, C, C, TMA)
            lam = times_inverse(lam, a, True, PRECISION)
        dS = tl.dot(reads, qq, dS, input_precision=PRECISION)
        if ERASE:
            pp = load_tile(ps, p_strides, q_token, q_stop, 0, KEYS, C, BK, KEYS_TMA)
            dS = tl.dot(-(lam * of_p[None, :]).to(ty), pp, dS, input_precision=PRECISION)
        if not ENDS:
            if DITHERED:
                lam *= 1.0 / by
            store_tile(dUs, v_matrix, tl.trans(lam.to(ty)), at, rows, w, VP, C, BV, TMA)
        e_q, e_p, b, gamma = load_rates(rates, gammas, head + tl.maximum(j - 1, 0) * HV, i, c, chunks, C, K, CHANNEL)
    if CHANNEL:
        dS *= unit
    if ENDS:
        store_state(dinitial, dinitial_strides, dS, z, hv, d, c, V, K, (number > 0) & (chunks > 0))
    elif INITIAL:
        first = (number == 0) & (n < N) if SEGMENTS else True
        store_state(dinitial, dinitial_strides, dS, n, hv, d, c, V, K, first)


def run_scan_backward(
    c: Draft, ch: Channels, s: Solved, f: Factors, r: Residual, do: Layout, dfinal: Layout | None,
    chain: StateGradients, dinitial: Layout | None, *choice: Tile, recompute: bool,
) -> None:  # fmt: skip
    """``recompute``: additional programs also write ``r``."""
    p, x = c.p, c.x
    ends = (x.initial_state, dfinal, *r, *chain, dinitial)
    strides_of = (states(p, x.initial_state), states(p, dfinal), states(p, dinitial))
    for t in choice or scan_tiles("scan_both" if recompute else "scan_backward", p, c.chip, c.every):
        launch_scan_backward(
            c, ch, s, f, do, ends, strides_of, t, p.N, 0, FINAL=dfinal is not None,
            INITIAL=x.initial_state is not None, RECOMPUTE=recompute, SEGMENTS=False, ENDS=False, follows=recompute,
        )  # fmt: skip


def launch_scan_backward(
    c: Draft, ch: Channels, s: Solved, f: Factors, do: Layout, ends: tuple[Layout | None, ...],
    strides_of: tuple[Any, ...], t: Tile, scans: int, length: int, *, follows: bool, **constants: bool,
) -> None:  # fmt: skip
    """``ends``: the tensors from ``initial_state`` to ``dinitial``. ``strides_of``: the strides of the first two and of
    the last of these. ``scans``: the number of sequences, or of slots of segments."""
    p, x = c.p, c.x
    pointers = (*readers(c, ch), x.v, x.w, do, x.cu_seqlens, s.A, *maps(ch, f), ch.gamma, *ends)
    grid = (-(-p.V // columns(p, t)), p.HV, scans * (1 + constants["RECOMPUTE"]))
    launch_rule(
        c, scan_backward, pointers, grid, t, p.N, p.T, length, state_unit(p), strides(x.q), strides(c.keys),
        strides(x.v), strides_if(x.w), strides(do), *strides_of, **constants, RAW_W=has_logits(c),
        **copies(c, t, x.v, x.w, do), follows=follows,
    )  # fmt: skip
