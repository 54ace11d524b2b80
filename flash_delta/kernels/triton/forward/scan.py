"""Stages ``scan`` and ``output``: the state scans from chunk to chunk.

    R = v - e^H . (p S0)      S1 = gamma S0 + X^T (b . R)      O = scale e^G . (q S0) + Y (b . R)

With a decay per channel (CHANNEL) U = A (b . R) + b . R, as A lacks its diagonal (solve.py). Rows are decayed:

    R = v - Kg S0             S1 = gamma . S0 + Kd^T U         O = scale Qg S0 + P U

With a strength per channel w . v takes the place of v (values.py).

`factor`'s X and Y would save one small product of five, and add 56 KB of memory traffic per chunk and head. The state
is kept transposed, S^T [BV, K], in float32 accumulators, which the next product reads from registers. So are R and O,
[BV, C]. Gates and norms (``rates``, see factor.py) are applied to accumulators. So q and p are multiplied as given, and
Qg and Kg lack only norms and the scale. One program scans a sequence with BV columns of one value head's state: grid
(V / BV, HV, N), and with packed sequences one more, which writes zeros after the last sequence.

On a pool of states (POOL: the number of value heads, otherwise 0) sequences start from slots, end in slots, and leave
checkpoints in slots. Checkpoints are at a stride, or one for each sequence, which serving/offsets.py completes up to
its offset. An index that names no slot is never used as an address. If a sequence lacks a slot that it needs, it is
padding, and its outputs are zeros. With SHORT only longer sequences are scanned: program z scans the one with z such
sequences before it. Only the device knows how many there are. A launch is for ``least`` to ``most`` of them. With fewer
or more its programs exit at once. A launch for ``others`` also serves more than ``most``. Its programs then scan
several sequences, one after the other.

For the backward pass (SAVE) it writes the state at every chunk's start ``[slots, HV, V'', K']`` (workspace.py), and R
and U, each ``[slots, HV, C, V']``. Without OUTPUT it is then a part of `scan_backward`.

A long sequence may be scanned in SEGMENTS of ``length`` tokens at the same time (segments.py). The grid is (V / BV, HV,
slots of segments). Each segment starts from the state in ``initial_state[slot]``, which `compose` has written. Before
that, a launch with MAP computes every segment's map of the state, S_end = Phi S + B. Its grid is ((V + K) / BV, ...).
The columns of Phi are those of a state that starts as the identity and gets no values.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import (
    C,
    bounds,
    find_segment,
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
from flash_delta.kernels.device.slots import load_slot, load_slots
from flash_delta.kernels.runtime.arguments import (
    checkpoint_table,
    count_checkpoints,
    launch_rule,
    states,
    strides,
    strides_if,
    table,
)
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Channels, Factors, Residual, Solved
from flash_delta.kernels.triton.forward.products import load_dither, times_inverse
from flash_delta.kernels.triton.forward.scan_launches import copies, has_logits, scan_grid, scan_launches, scan_operands
from flash_delta.kernels.triton.forward.values import load_values, value_rows
from flash_delta.problem import Slots


@triton.jit
def load_state(state, strides, n, hv, d, c, V: tl.constexpr, K: tl.constexpr, stored=True):
    """S^T [BV, BK] in float32. Strides are (sequence, head, key, value) of the caller's layout. 0 if it is not
    ``stored``."""
    at = state + n.to(tl.int64) * strides[0] + hv * strides[1] + d[:, None] * strides[3] + c[None, :] * strides[2]
    return tl.load(at, mask=(d < V)[:, None] & (c < K)[None, :] & stored, other=0.0).to(tl.float32)


@triton.jit
def store_state(state, strides, S, n, hv, d, c, V: tl.constexpr, K: tl.constexpr, stored=True):
    at = state + n.to(tl.int64) * strides[0] + hv * strides[1] + d[:, None] * strides[3] + c[None, :] * strides[2]
    tl.store(at, S.to(state.dtype.element_ty), mask=(d < V)[:, None] & (c < K)[None, :] & stored)


@triton.jit
def load_rates(rates, gammas, head, i, c, chunks, C: tl.constexpr, K: tl.constexpr, CHANNEL: tl.constexpr):
    """The factors of one chunk: scale e^G and e^H of its rows, b, and gamma. A sequence without chunks reads nothing.

    With CHANNEL gamma is [1, BK], e_q and e_p are what `channel` has not applied, and e_p is also for keys that write.
    """
    at, some = rates + head * (4 * C) + i, i < chunks * C
    e_q, e_p = tl.load(at, mask=some, other=0.0), tl.load(at + C, mask=some, other=0.0)
    b = tl.load(at + 2 * C, mask=some, other=0.0)
    if CHANNEL:
        gamma = tl.load(gammas + head * K + c, mask=c < tl.minimum(chunks, 1) * K, other=0.0)[None, :]
    else:
        gamma = tl.load(rates + head * (4 * C) + 3 * C, mask=chunks > 0, other=0.0)
    return e_q, e_p, b, gamma


@triton.jit
def find_offset(offsets, n, row, length):
    """The number of tokens after which sequence n leaves its checkpoint, and whether it leaves one."""
    offset = tl.load(offsets + n.to(tl.int64) * row)
    wanted = (offset >= 0) & (offset <= length)
    return tl.where(wanted, offset, 0).to(tl.int32), wanted


@triton.jit
def find_checkpoints(offsets, n, row, length, interval, columns, C):
    """The chunks between two checkpoints of sequence n, and the most checkpoints that it may leave. With offsets: the
    chunks before its only checkpoint, and 1, or 0 if it leaves none (serving/offsets.py)."""
    if offsets is None:
        return interval, columns
    else:
        offset, wanted = find_offset(offsets, n, row, length)
        chunks = tl.where(offset == length, (offset + C - 1) // C, offset // C)
        wanted &= chunks > 0
        return tl.where(wanted, chunks, 2**30), wanted.to(tl.int32)


@triton.jit
def find_part(m, interval, chunks, offsets):
    """The first chunk of part m, and the chunk after its last. With offsets there are two parts."""
    begin, end = m * interval, tl.minimum((m + 1) * interval, chunks)
    if offsets is not None:
        end = tl.where(m == 0, end, chunks)
    return begin, end


@triton.jit
def is_reached(m, interval, columns, length, offsets, C):
    """Whether a checkpoint comes after part m. A checkpoint at the end of a sequence may come after part of a chunk."""
    if offsets is None:
        return (m < columns) & ((m + 1) * interval * C <= length)
    else:
        return m < columns


@triton.jit
def store_zeros(
    o_rows, o_strides, start, stop, column, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STEPS: tl.constexpr
):
    for token in range(start, stop, C):
        zeros = tl.zeros([C, BV], o_rows.dtype.element_ty)
        store_tile(o_rows, o_strides, zeros, token, stop, column, V, C, BV, False, STEPS)


@triton.jit
def find_long(rank, cu_seqlens, N, T, SHORT: tl.constexpr):
    """The sequence of more than SHORT tokens with ``rank`` such sequences before it, and how many there are."""
    n, count = N, rank * 0
    for i in range(0, N, 128):
        at = i + tl.arange(0, 128)
        start, stop, _ = bounds(at, cu_seqlens, N, T, 1, True)
        long = ((at < N) & (stop - start > SHORT)).to(tl.int32)
        before = count + tl.cumsum(long, 0) - long
        n = tl.minimum(n, tl.min(tl.where((long != 0) & (before == rank), at, N), 0))
        count += tl.sum(long, 0)
    return n, count


@triton.jit
def find_tokens(z, length, cu_seqlens, N, T, C: tl.constexpr, PACKED: tl.constexpr, SEGMENTS: tl.constexpr):
    """The segment or the sequence that program z scans, in the form of `find_segment`."""
    if SEGMENTS:
        return find_segment(z, length, cu_seqlens, N, T, C, PACKED)
    else:
        start, stop, slot = bounds(z, cu_seqlens, N, T, C, PACKED)
        return z, z * (1 - PACKED), start, stop, slot, 0, True


@triton.jit
def scan_sequence(
    z, n, row, start, stop, slot, number, ends, tensors, indices, numbers, q_strides, p_strides, v_strides,
    w_strides, initial_strides, final_strides, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, ERASE: tl.constexpr,
    INITIAL: tl.constexpr, POOL: tl.constexpr, SEGMENTS: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    CHANNEL: tl.constexpr, RAW_W: tl.constexpr, STEPS: tl.constexpr, TMA: tl.constexpr, GIVEN_TMA: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scans tokens ``start`` to ``stop`` of sequence n, or of segment z in it. Their chunks begin in ``slot``."""
    q, p, v, w_gate, cu_seqlens, A, X, Y, rates, gammas, initial_state, o, final_state, states, R_out, U_out = tensors
    read_indices, write_indices, has_initial_state, checkpoint_indices, checkpoint_offsets = indices
    N, T, length, slots, columns, interval, read_row, write_row, has_row, checkpoint_row, checkpoint_column = numbers
    MAP: tl.constexpr = SEGMENTS and not OUTPUT and not SAVE
    KP: tl.constexpr = pitch(K)
    VP: tl.constexpr = pitch(V)
    ROWS: tl.constexpr = whole_rows(V)
    h, hv, w = tl.program_id(1) // GROUP, tl.program_id(1), tl.program_id(0) * BV
    i, c, d = tl.arange(0, C), tl.arange(0, BK), w + tl.arange(0, BV)
    ty: tl.constexpr = v.dtype.element_ty
    o_strides = ((T // STEPS).to(tl.int64) * HV * V, HV * V, V, 1)
    if OUTPUT:
        o_rows = rows_of(o, o_strides, row, hv)
    # In tensors with slots, rows of the sequence's first chunk begin at this head. The next chunk's are HV * C further.
    head = slot.to(tl.int64) * HV + hv
    chunks = (stop - start + C - 1) // C
    first, stored, last, well = n, True, n, True  # where the states are
    if POOL:
        first, stored, last, well = load_slots(
            read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
        )
    if MAP:  # no map for a sequence's last segment; no Phi for the first one, whose first state is known
        well = (chunks > 0) & (n < N) & (ends == 0) & ((number > 0) | (w < V))
        stored, last = well & (number == 0), z
    if POOL or MAP or (SEGMENTS and SAVE):
        chunks = tl.where(well & (n < N) if SEGMENTS else well, chunks, 0)
    CHECKPOINTS: tl.constexpr = POOL and checkpoint_indices is not None
    rows, k_matrix, v_matrix, c_matrix = chunks * (HV * C), (0, KP, 0, 1), (0, VP, 0, 1), (0, C, 0, 1)
    Xs = matrix(X + head * C * KP, k_matrix, rows, KP, C, BK, TMA)
    values = value_rows(v, w_gate, v_strides, w_strides, row, hv, stop, V, C, BV, GIVEN_TMA)
    q_rows, p_rows, q_stop = rows_of(q, q_strides, row, h), rows_of(p, p_strides, row, h), stop
    KEYS: tl.constexpr = KP if CHANNEL else K  # numbers in a row of the tensors that read and erase
    KEYS_TMA: tl.constexpr = TMA if CHANNEL else GIVEN_TMA
    if CHANNEL:
        q_rows, p_rows, q_stop = q + head * C * KP, p + head * C * KP, rows
        q_strides, p_strides = k_matrix, k_matrix
    if ERASE:
        ps = matrix(p_rows, p_strides, q_stop, KEYS, C, BK, KEYS_TMA)
    # With 128 value columns a third stage of all tiles does not fit. P in registers takes 258 us, not 303 (docs/notes).
    AHEAD: tl.constexpr = CHANNEL and OUTPUT and not SAVE and BV == 128
    if OUTPUT:
        qs = matrix(q_rows, q_strides, q_stop, KEYS, C, BK, KEYS_TMA and STEPS == 1)
        if not AHEAD:
            Ys = matrix(Y + head * C * C, c_matrix, rows, C, C, C, TMA)
        os = matrix(o_rows, o_strides, stop, V, C, BV, GIVEN_TMA and STEPS == 1)
    if SAVE:
        Ss = matrix(states + head * ROWS * KP, k_matrix, chunks * (HV * ROWS), KP, BV, BK, TMA)
        Rs = matrix(R_out + head * C * VP, v_matrix, rows, VP, C, BV, TMA)
        Us = matrix(U_out + head * C * VP, v_matrix, rows, VP, C, BV, TMA)
    if ERASE and (SAVE or CHANNEL):
        As = matrix(A + head * C * C, c_matrix, rows, C, C, C, TMA)
    S = tl.zeros([BV, BK], tl.float32)
    if INITIAL:
        S = load_state(initial_state, initial_strides, first, hv, d, c, V, K, stored)
    follow(OVERLAP)
    if SEGMENTS and not MAP:  # `compose` wrote it
        S = load_block(initial_state + (z.to(tl.int64) * HV + hv) * V * K, w, 0, V, K, BV, BK)
    if MAP:
        S = tl.where(d[:, None] == V + c[None, :], 1.0, S)  # column V + j of S^T is the image of key j
    if POOL:
        store_zeros(o_rows, o_strides, tl.where(well, stop, start), stop, w, V, C, BV, STEPS)
    # Loaded one chunk ahead, into registers. Through shared memory they took 0.8 of 2.2 us on an H200 (docs/notes).
    if AHEAD:
        y_ahead = load_block(Y + head * C * C, 0, 0, C, C, C, C)
    e_q, e_p, b, gamma = load_rates(rates, gammas, head, i, c, chunks, C, K, CHANNEL)
    # One loop from checkpoint to checkpoint. A checkpoint inside of a pipelined loop would need more shared memory.
    # Maps also have parts, before which zeros are looked for: with strong gates Phi is soon zero, and stays zero.
    begin, end = 0, chunks
    interval, columns = find_checkpoints(checkpoint_offsets, n, checkpoint_column, stop - start, interval, columns, C)
    parts = (chunks + interval - 1) // interval if CHECKPOINTS or MAP else 1
    for m in range(parts if checkpoint_offsets is None else tl.minimum(parts, 2)):
        if CHECKPOINTS or MAP:
            begin, end = find_part(m, interval, chunks, checkpoint_offsets)
        if MAP:
            end = tl.where((w >= V) & (tl.max((S != 0.0).to(tl.int32)) == 0), begin, end)
        for j in range(begin, end):
            token, at = start + j * C, j * (HV * C)
            q_token = at if CHANNEL else token
            x = load_tile(Xs, k_matrix, at, rows, 0, KP, C, BK, TMA)
            R = load_values(values, v_strides, w_strides, token, stop, w, V, C, BV, GIVEN_TMA, RAW_W)  # [BV, C]
            s = S.to(ty)
            if SAVE:
                store_tile(Ss, k_matrix, s, j * (HV * ROWS) + w, j * (HV * ROWS) + ROWS, 0, KP, BV, BK, TMA)
            if ERASE:
                pp = load_tile(ps, p_strides, q_token, q_stop, 0, KEYS, C, BK, KEYS_TMA)
                E = tl.dot(s, tl.trans(pp), input_precision=PRECISION)  # [BV, C]
            if OUTPUT:
                qq = load_tile(qs, q_strides, q_token, q_stop, 0, KEYS, C, BK, KEYS_TMA and STEPS == 1, STEPS)
                O = tl.dot(s, tl.trans(qq), input_precision=PRECISION)  # [BV, C]
            if ERASE:
                R -= E * e_p[None, :]
            if SAVE:
                store_tile(Rs, v_matrix, tl.trans(R.to(ty)), at, rows, w, VP, C, BV, TMA)
            R *= b[None, :]
            u, written = R.to(ty), R.to(ty)  # [BV, C]
            if OUTPUT:
                O *= e_q[None, :]
            if ERASE and (SAVE or CHANNEL):
                a = tl.trans(load_tile(As, c_matrix, at, rows, 0, C, C, C, TMA))
                U = times_inverse(R, a, CHANNEL, PRECISION, load_dither(rates, head + j * HV, C, SAVE and not CHANNEL))
                u, written = U.to(ty), (U * e_p[None, :]).to(ty) if CHANNEL else written
            S = tl.dot(written, x, S * gamma, input_precision=PRECISION)
            if OUTPUT:
                y = y_ahead if AHEAD else load_tile(Ys, c_matrix, at, rows, 0, C, C, C, TMA)
                O = tl.dot(u if CHANNEL else written, tl.trans(y), O, input_precision=PRECISION)
                store_tile(os, o_strides, tl.trans(O.to(ty)), token, stop, w, V, C, BV, GIVEN_TMA and STEPS == 1, STEPS)
            if SAVE:
                store_tile(Us, v_matrix, tl.trans(u), at, rows, w, VP, C, BV, TMA)
            later = head + tl.minimum(j + 1, chunks - 1) * HV
            if AHEAD:
                y_ahead = load_block(Y + later * C * C, 0, 0, C, C, C, C)
            e_q, e_p, b, gamma = load_rates(rates, gammas, later, i, c, chunks, C, K, CHANNEL)
        if CHECKPOINTS:
            reached = is_reached(m, interval, columns, stop - start, checkpoint_offsets, C)
            slot, known = load_slot(checkpoint_indices, n, m, (checkpoint_row, checkpoint_column), slots, reached)
            store_state(final_state, final_strides, S, slot, hv, d, c, V, K, known)
    if SEGMENTS and OUTPUT:  # again: kept through the loop, they take too many registers (Triton 3.9, BV = 128)
        last, _, _, _, _, _, well = find_tokens(z, length, cu_seqlens, N, T, C, PACKED, SEGMENTS)
    if (OUTPUT or MAP) and (not POOL or write_indices is not None):
        store_state(final_state, final_strides, S, last, hv, d, c, V + K if MAP else V, K, well)


NUMBERS = [  # Triton would specialise values of 1 and multiples of 16
    "N", "T", "length", "least", "most", "others", "slots", "null_slot", "columns", "interval", "read_row", "write_row",
    "has_row", "checkpoint_row", "checkpoint_column", "HV",
]  # fmt: skip
INDICES = [  # see decode.py
    "read_indices", "write_indices", "has_initial_state", "checkpoint_indices", "checkpoint_offsets",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def scan(
    q, p, v, w_gate, cu_seqlens, A, X, Y, rates, gammas, initial_state, o, final_state, states, R_out, U_out,
    read_indices, write_indices, has_initial_state, checkpoint_indices, checkpoint_offsets, N, T, length, least, most,
    others, slots, null_slot, columns, interval, read_row, write_row, has_row, checkpoint_row, checkpoint_column,
    q_strides, p_strides, v_strides, w_strides, initial_strides, final_strides, HV, GROUP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    SHORT: tl.constexpr, ERASE: tl.constexpr, INITIAL: tl.constexpr, POOL: tl.constexpr, SEGMENTS: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr, CHANNEL: tl.constexpr, RAW_W: tl.constexpr, STEPS: tl.constexpr,
    TMA: tl.constexpr, GIVEN_TMA: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tensors = (q, p, v, w_gate, cu_seqlens, A, X, Y, rates, gammas, initial_state, o, final_state, states, R_out, U_out)
    indices = (read_indices, write_indices, has_initial_state, checkpoint_indices, checkpoint_offsets)
    slots = (slots, null_slot)
    numbers = (N, T, length, slots, columns, interval, read_row, write_row, has_row, checkpoint_row, checkpoint_column)
    z, hv, w = tl.program_id(2), tl.program_id(1), tl.program_id(0) * BV
    if POOL:  # a constant: as a number it makes registers spill there
        HV = POOL
    o_strides = ((T // STEPS).to(tl.int64) * HV * V, HV * V, V, 1)
    if POOL and SHORT > 0:
        if others != 0:
            lead(OVERLAP)  # the next kernel is `decode`, which needs no results of this one
        n, count = find_long(z, cu_seqlens, N, T, SHORT)
        if (count < least) | ((count > most) & (others == 0)):
            follow(OVERLAP)  # for the next launch, which waits only for this one
            return
        turns = tl.num_programs(2) - 1
        if z == turns:
            start, stop, _ = bounds(N, cu_seqlens, N, T, C, PACKED)
            follow(OVERLAP)
            store_zeros(rows_of(o, o_strides, z * 0, hv), o_strides, start, stop, w, V, C, BV, STEPS)
            return
        if count > most:
            for rank in range(z, count, turns):
                n, _ = find_long(rank, cu_seqlens, N, T, SHORT)
                start, stop, slot = bounds(n, cu_seqlens, N, T, C, PACKED)
                scan_sequence(
                    z, n, z * 0, start, stop, slot, 0, True, tensors, indices, numbers, q_strides, p_strides,
                    v_strides, w_strides, initial_strides, final_strides, HV, GROUP, K, BK, V, BV, C, PACKED, ERASE,
                    INITIAL, POOL, SEGMENTS, OUTPUT, SAVE, CHANNEL, RAW_W, STEPS, TMA, GIVEN_TMA, OVERLAP, PRECISION,
                )  # fmt: skip
        elif z < count:  # outside of the loop, where it would spill and take 8 % longer (docs/notes)
            start, stop, slot = bounds(n, cu_seqlens, N, T, C, PACKED)
            scan_sequence(
                z, n, z * 0, start, stop, slot, 0, True, tensors, indices, numbers, q_strides, p_strides,
                v_strides, w_strides, initial_strides, final_strides, HV, GROUP, K, BK, V, BV, C, PACKED, ERASE,
                INITIAL, POOL, SEGMENTS, OUTPUT, SAVE, CHANNEL, RAW_W, STEPS, TMA, GIVEN_TMA, OVERLAP, PRECISION,
            )  # fmt: skip
    else:
        n, row, start, stop, slot, number, ends = find_tokens(z, length, cu_seqlens, N, T, C, PACKED, SEGMENTS)
        if PACKED and OUTPUT and n == N:
            store_zeros(rows_of(o, o_strides, row, hv), o_strides, start, stop, w, V, C, BV, STEPS)
            return
        scan_sequence(
            z, n, row, start, stop, slot, number, ends, tensors, indices, numbers, q_strides, p_strides, v_strides,
            w_strides, initial_strides, final_strides, HV, GROUP, K, BK, V, BV, C, PACKED, ERASE, INITIAL, POOL,
            SEGMENTS, OUTPUT, SAVE, CHANNEL, RAW_W, STEPS, TMA, GIVEN_TMA, OVERLAP, PRECISION,
        )  # fmt: skip


def run_scan(
    c: Draft, ch: Channels, s: Solved, f: Factors, o: Layout, final: Layout | None, r: Residual | None,
    *choice: Tile, slots: Slots | None = None,
) -> None:  # fmt: skip
    """Launches scan and output. ``r``: tensors to write for the backward pass. ``slots``: those of a pool."""
    p, x, kernel = c.p, c.x, "scan" if r is None else "scan_kept"
    initial, indices, counts = x.initial_state, (None,) * 5, (0,) * 4
    if slots is not None:
        initial = final = slots.state_pool
        indices = (slots.read_indices, slots.write_indices, slots.has_initial_state, slots.checkpoint_indices)
        indices += (slots.checkpoint_offsets,)
        every_chunks = min(p.pools.checkpoint_every, p.T + C) // C
        counts = (final.shape[0], p.pools.null_slot, count_checkpoints(slots), every_chunks)

    pointers = (*scan_operands(c, ch, s, f), initial, o, final, *(r or (None,) * 3), *indices)
    for w in scan_launches(kernel, p, c.chip, c.every, *choice):
        t = w.tile
        launch_rule(
            c, scan, pointers, scan_grid(p, w), t,
            p.N, p.T, 0, w.least, w.most, int(w.others), *counts, *(table(t)[0] for t in indices[:3]),
            *checkpoint_table(*indices[3:]), strides(x.q), strides(c.keys), strides(x.v), strides_if(x.w),
            states(p, initial), states(p, final),
            INITIAL=initial is not None, POOL=0 if slots is None else p.HV, SEGMENTS=False, OUTPUT=True,
            SAVE=r is not None, RAW_W=has_logits(c), **copies(c, t, x.v, x.w), follows=True,
        )  # fmt: skip
