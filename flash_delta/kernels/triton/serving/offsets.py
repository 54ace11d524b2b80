"""Checkpoints of a prefill at offsets, one for every sequence.

The kernel that scans a sequence in chunks leaves its state after the last whole chunk before the offset, or at the end
of the sequence if the offset is there. From this state, the tokens up to the offset, at most 63, run here one by one,
with float32 states between tokens, as `decode` runs a short sequence. No output depends on it.

There are two launches, which find their sequences by themselves. One comes before all other kernels of the call. It
continues first states of sequences, which the other kernels may overwrite. The other launch comes after all kernels. It
continues the state in the checkpoint's slot. This is the state that the scan has left, or a sequence's first state if
that is in this slot. Neither launch overlaps with another kernel.

One program has BV value columns of one value head of one sequence: grid (N HV V / BV).
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds
from flash_delta.kernels.device.slots import load_slot, load_slots
from flash_delta.kernels.runtime.arguments import columns, launch_rule, states, table
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.triton.forward.scan import find_offset
from flash_delta.kernels.triton.serving.decode import counted, counted_gate, find_rows, load_state, state_at, tile_of
from flash_delta.kernels.triton.serving.token import (
    activate,
    advance,
    block_of,
    channels,
    halvings_of,
    in_blocks,
    in_rows,
    load_gate,
    load_token,
    load_values,
)
from flash_delta.kernels.triton.tiles import decode_tiles
from flash_delta.problem import Slots

NUMBERS = [
    "N", "T", "slots", "null_slot", "k_token", "v_token", "g_token", "beta_token", "b_token", "w_token", "read_row",
    "write_row",
    "has_row", "checkpoint_row", "offset_row", "HV",
]  # fmt: skip
INDICES = [  # see decode.py
    "read_indices", "write_indices", "has_initial_state", "checkpoint_indices", "checkpoint_offsets",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def scan_to_offset(
    k, v, g, beta, b_gate, w_gate, A_log, dt_bias, pool, read_indices, write_indices, has_initial_state,
    checkpoint_indices,
    checkpoint_offsets, cu_seqlens, N, T, slots, null_slot, bound, beta_range, slot_stride, k_token, v_token, g_token,
    beta_token, b_token, w_token, read_row, write_row, has_row, checkpoint_row, offset_row, k_strides, v_strides,
    g_strides, beta_strides, b_strides, w_strides, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    STRIDES: tl.constexpr, SHORT: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    STRENGTH: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """BEFORE: the other kernels have not run yet. For strides and units see `decode`; those of single numbers have
    64 bits."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program, slots = tl.program_id(0), (slots, null_slot)
    w, hv, n = program % BLOCKS * BV, program // BLOCKS % HV, program // (BLOCKS * HV)
    BITS: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth
    X: tl.constexpr = block_of(BK, STRIDES, BITS)
    HALVINGS: tl.constexpr = halvings_of(STRIDES, BITS)
    h, c, d = hv // GROUP, channels(BK, X), w + tl.arange(0, BV)
    start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
    offset, wanted = find_offset(checkpoint_offsets, n, offset_row, stop - start)
    finished = (start + offset == stop) & (stop - start > SHORT)  # scanned to its end, so nothing is left
    begin = offset // C * C
    if (wanted == 0) | finished:
        return
    read, stored, _, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
    )
    slot, well = load_slot(checkpoint_indices, n, 0, (checkpoint_row, 0), slots, well)
    there = (begin > 0) | (stored & (slot == read))  # the state to continue is in the slot
    if (well == 0) | (there == BEFORE) | (there & (offset == begin)):
        return
    d_rows, c_rows = find_rows(w, BK, BV, X)
    inside = (d_rows < V) & (c_rows < K)
    tile = tile_of(pool, hv, d_rows, c_rows, STRIDES)
    first = state_at(tile, tl.where(there, slot, read), slot_stride)
    S = in_blocks(load_state(first, inside & (stored | there)).to(tl.float32), BV)
    if offset > begin:
        rate, bias = load_gate(A_log, dt_bias, hv, c, K, CHANNEL, RAW_GATE, HAS_A, HAS_BIAS)
        gate = (rate, bias, 1.0, bound, beta_range)
        row = n * 0
        ks, vs = (k, k_strides, row, k_token), (v, v_strides, row, v_token)
        gs = (g, g_strides, row, g_token if CHANNEL else g_token.to(tl.int64))
        bs, ws = (b_gate, b_strides, row, b_token), (w_gate, w_strides, row, w_token)
        betas = (beta, beta_strides, row, beta_token.to(tl.int64))
        K_EVEN: tl.constexpr = K == BK
        V_EVEN: tl.constexpr = V % BV == 0
        # Keys are passed as queries, since no output is needed. Each token is loaded one token ahead.
        token = load_token(ks, ks, gs, betas, bs, start + begin, h, hv, c, K, K_EVEN, CHANNEL)
        values = load_values(vs, ws, start + begin, hv, d, V, V_EVEN)
        for t in range(start + begin, start + offset):
            this, its_values = token, values
            after = tl.minimum(t + 1, start + offset - 1)
            token = load_token(ks, ks, gs, betas, bs, after, h, hv, c, K, K_EVEN, CHANNEL)
            values = load_values(vs, ws, after, hv, d, V, V_EVEN)
            active = activate(this, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH)
            S, _output, _record = advance(S, active, its_values, RAW_BETA, STRENGTH, HALVINGS)
    tl.store(state_at(tile, slot, slot_stride), in_rows(S.to(pool.dtype.element_ty)), mask=inside)


def run_scan_to_offset(c: Draft, s: Slots, *, before: bool) -> None:
    """Launches it before the other kernels of a call, or after them. The tiles are those of `decode`, since the sums
    are the same."""
    p, x = c.p, c.x
    indices = (s.read_indices, s.write_indices, s.has_initial_state, s.checkpoint_indices, s.checkpoint_offsets)
    pointers = (x.k, x.v, x.g, x.beta, x.b, x.w, x.A_log, x.dt_bias, s.state_pool, *indices, x.cu_seqlens)
    per_token = [counted(t, False, singly=True) for t in (x.k, x.v, x.g, x.beta)]
    per_token += [counted_gate(t, False, singly=True) for t in (x.b, x.w)]
    slot, *inner = states(p, s.state_pool)
    for t in decode_tiles(p, c.chip, c.every):
        launch_rule(
            c, scan_to_offset, pointers, (p.N * p.HV * -(-p.V // columns(p, t)), 1, 1), t,
            p.N, p.T, s.state_pool.shape[0], p.pools.null_slot, p.gate.bound or 0.0, p.beta_range, slot,
            *(token for (_, token), _ in per_token), *(table(t)[0] for t in indices),
            *(strides for _, strides in per_token), STRIDES=tuple(inner), BEFORE=before, contracts=False,
        )  # fmt: skip
