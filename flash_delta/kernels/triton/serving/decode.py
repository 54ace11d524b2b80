"""Stage ``step`` on a pool of states: T tokens for every row of a batch, one after the other.

    S~ = e^g S      u = b (v - S~^T k)      S = S~ + k u^T      o = scale S^T q

On request also what a layer does around it: a short convolution of q, k and v before it (window.py), and a gated norm
of o after it.

One program takes BV value columns of HEADS value heads of one row: grid (B HV / HEADS V / BV). It reads its part of
the row's state once, and writes it after every token whose slot ``write_indices`` names. The state is in registers,
transposed, S^T [BV, BK]. A norm needs all columns of a head in one program. A convolution also needs all heads that
share q and k, or one program would overwrite the windows that another reads.

Between tokens the state has the pool's dtype, whether it is written or not. So the number of calls in which tokens
come does not matter. Neither do the other arguments: products are rounded by themselves or are written as ``fma``, and
the compiler contracts none. The compiled code only knows whether T is 1 (ALONE), and its arithmetic is the same for
both (tests/test_compiler.py).

With SHORT the rows are packed sequences. It runs those of up to SHORT tokens, with float32 states in between as `scan`
does; the programs of longer ones exit at once. A sequence without tokens copies its state. This is then the call's
last kernel. It may run beside the others, since it shares only what all of them read. One more program, after the last
row, waits for them.

With ``initial`` the rows start from slots of those states, which are laid out as the pool is. The pool is then only
written. Without ``read_indices`` every row has the slot of its own number, which it reads and writes.

Indices are what the device says. An index that is no slot is never an address: ``live`` masks loads and stores.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device import activation, channel_gate
from flash_delta.kernels.device.activation import gated_norm, strength
from flash_delta.kernels.device.chunk import bounds, follow
from flash_delta.kernels.runtime.arguments import columns, every, launch_rule, short, states, table
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.compile_key import alone, unit
from flash_delta.kernels.triton.serving.window import convolve, load_window, push, store_window
from flash_delta.kernels.triton.tiles import decode_tiles
from flash_delta.problem import Around, Slots


@triton.jit
def load_numbers(x, strides, unit, head, c, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Of one token and head, as they are; strides: (unit, head, channel). EVEN: none of ``c`` is after the last."""
    at = x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + c * strides[2]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=c < WIDTH, other=0.0)


@triton.jit
def load_number(x, strides, unit, head):
    """Of one token and head; strides: (unit, head)."""
    return tl.load(x + unit.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1])


@triton.jit
def load_token(
    q, k, v, g, beta, t, h, hv, c, d, K: tl.constexpr, K_EVEN: tl.constexpr, V: tl.constexpr, V_EVEN: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Of token t, as they are. Each tensor comes with its strides, and with the units to its row and of a token."""
    qt = load_numbers(q[0], q[1], q[2] + t * q[3], h, c, K, K_EVEN)  # [BK]
    kt = load_numbers(k[0], k[1], k[2] + t * k[3], h, c, K, K_EVEN)
    vt = load_numbers(v[0], v[1], v[2] + t * v[3], hv, d, V, V_EVEN)  # [BV]
    if CHANNEL:
        gt = load_numbers(g[0], g[1], g[2] + t * g[3], hv, c, K, K_EVEN)
    else:
        gt = load_number(g[0], g[1], g[2] + t * g[3], hv)
    return qt, kt, vt, gt, load_number(beta[0], beta[1], beta[2] + t * beta[3], hv)


@triton.jit
def load_gate(
    A_log, dt_bias, hv, c, K: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What `log_decay` takes of a head's parameters."""
    rate, bias = 1.0, 0.0
    if CHANNEL:
        rate, bias = channel_gate.parameters(A_log, dt_bias, hv, c, K, RAW_GATE, HAS_A, HAS_BIAS)
    elif RAW_GATE:
        rate, bias = activation.gate_parameters(A_log, dt_bias, hv, HAS_BIAS)
    return rate, bias


@triton.jit
def log_decay(
    a, rate, bias, lower_bound, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr
):  # fmt: skip
    if CHANNEL:
        return channel_gate.log_decay(a, rate, bias, lower_bound, 1.0, RAW_GATE, BOUNDED)[None, :]
    elif RAW_GATE:
        return activation.log_decay(a, rate, bias)
    else:
        return a.to(tl.float32)


@triton.jit
def load_index(table, row, column, strides, live=True):
    return tl.load(table + row.to(tl.int64) * strides[0] + column * strides[1], mask=live, other=-1)


@triton.jit
def as_slot(index, slots, live):
    """A slot, and whether it is one. ``slots``: how many there are, and the index that stands for none."""
    return index.to(tl.int32), live & (index >= 0) & (index < slots[0]) & (index != slots[1])


@triton.jit
def load_slot(table, row, column, strides, slots, live):
    """Nothing is read where ``live`` is not."""
    return as_slot(load_index(table, row, column, strides, live), slots, live)


@triton.jit
def find_state(
    read_indices, accepted, has_initial_state, b, read_row, read_column, accepted_row, has_row, columns, slots
):
    """The slot that a row reads, whether there is a state in it, and whether there is a row."""
    column, live = b * 0, b >= 0
    if accepted is not None:
        count = tl.load(accepted + b.to(tl.int64) * accepted_row)
        column, live = (count - 1).to(tl.int32), (count >= 1) & (count <= columns)
    slot = b
    if read_indices is not None:
        slot, live = load_slot(read_indices, b, column, (read_row, read_column), slots, live)
    stored = live
    if has_initial_state is not None:
        has = tl.load(has_initial_state + b.to(tl.int64) * has_row) != 0
        live, stored = live | (has == 0), live & has
    return slot, stored, live


@triton.jit
def load_state(tile, slot, slot_stride, live):
    """To stay in the L2 cache as long as can be: it is usually written over in place, a moment later (docs/notes)."""
    return tl.load(tile + slot.to(tl.int64) * slot_stride, mask=live, other=0.0, eviction_policy="evict_last")


@triton.jit
def tiles_of(pool, initial, hv, w, c, BV: tl.constexpr, STRIDES: tl.constexpr):
    """Of a slot: of a head BV columns from w on, transposed, as rows start from them and as they are written."""
    tile = pool + hv.to(tl.int64) * STRIDES[0] + w * STRIDES[2]
    source = tile if initial is None else initial + hv.to(tl.int64) * STRIDES[0] + w * STRIDES[2]
    inner = tl.arange(0, BV)[:, None] * STRIDES[2] + c[None, :] * STRIDES[1]
    return source + inner, tile + inner


@triton.jit
def reciprocal_length(x):
    return tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def read_by(S, x):
    """S^T x [BV], of [BV, BK] and [BK]."""
    return tl.sum(S * x[None, :], 1)


NUMBERS = [  # Triton would specialise what is 1 or a multiple of 16, in tuples even if told not to
    "N", "T", "slots", "null_slot", "columns", "first_written", "q_row", "q_token", "k_row", "k_token", "v_row",
    "v_token", "g_row", "g_token", "beta_row", "beta_token", "z_row", "z_token", "read_row", "read_column",
    "accepted_row", "write_row", "write_token", "parents_row", "parents_token", "has_row",
]  # fmt: skip
# Servers slice these; to a load of one number an address is as good as any other.
INDICES = ["read_indices", "write_indices", "accepted", "parents", "has_initial_state"]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def decode(
    q, k, v, g, beta, A_log, dt_bias, initial, pool, read_indices, write_indices, accepted, parents, has_initial_state,
    cu_seqlens, conv_pool, conv_weight, conv_bias, z, norm_weight, o,
    N, T, slots, null_slot, columns, first_written, scale, lower_bound, beta_range, eps, slot_stride, conv_stride,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token, z_row, z_token,
    read_row, read_column, accepted_row, write_row, write_token, parents_row, parents_token, has_row,
    q_strides, k_strides, v_strides, g_strides, beta_strides, z_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS: tl.constexpr, ALONE: tl.constexpr, STRIDES: tl.constexpr, CONV: tl.constexpr, ACTIVATION: tl.constexpr,
    SHORT: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """From one batch row and from one token to the next it is ``q_row`` and ``q_token`` units, whose length is
    ``q_strides[0]``; and so on (launch_decode.counted). ALONE: T is 1. STRIDES: of the pool's (head, key, value)."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    WRITES: tl.constexpr = read_indices is None or write_indices is not None
    K_EVEN: tl.constexpr = K == BK
    V_EVEN: tl.constexpr = V % BV == 0
    program = tl.program_id(0)
    w, head, b = program % BLOCKS * BV, program // BLOCKS % (HV // HEADS) * HEADS, program // (BLOCKS * (HV // HEADS))
    h, c, d = head // (HV // H), tl.arange(0, BK), w + tl.arange(0, BV)
    inside = tl.full([BV, BK], True, tl.int1)
    if not (K_EVEN and V_EVEN):
        inside = (d < V)[:, None] & (c < K)[None, :]
    row, start, slots = b, b * 0, (slots, null_slot)
    if SHORT > 0:
        if b == N:  # after the last row: this kernel has not ended before the call's others
            follow(OVERLAP)
            return
        start, stop, _ = bounds(b, cu_seqlens, N, T, 1, True)
        row, T, first_written = b * 0, stop - start, stop - start - 1
    # Before what ends programs: where it is on its way together with the row's bounds.
    row_slot, stored, is_row = find_state(
        read_indices, accepted, has_initial_state, b, read_row, read_column, accepted_row, has_row, columns, slots
    )
    if (T > SHORT and SHORT > 0) or (T < 1 and (SHORT == 0 or not WRITES)):
        return
    write_strides = (write_row, write_token)
    if SHORT > 0 and WRITES and T < 1:  # the state moves on as it is
        slot, live = row_slot, is_row
        if write_indices is not None:
            slot, live = load_slot(write_indices, b, 0, write_strides, slots, is_row)
        source, tile = tiles_of(pool, initial, head, w, c, BV, STRIDES)
        at = tile + slot.to(tl.int64) * slot_stride
        tl.store(at, load_state(source, row_slot, slot_stride, inside & stored), mask=inside & live)
        return
    if CONV is not None:
        q_at, k_at = h * K, (H + h) * K  # first channels
        q_first = load_window(conv_pool, row_slot, conv_stride, q_at, c, K, stored, CONV)
        k_first = load_window(conv_pool, row_slot, conv_stride, k_at, c, K, stored, CONV)
    qs, ks = (q, q_strides, row * q_row, q_token), (k, k_strides, row * k_row, k_token)
    vs, gs = (v, v_strides, row * v_row, v_token), (g, g_strides, row * g_row, g_token)
    betas = (beta, beta_strides, row * beta_row, beta_token)
    for j in range(HEADS):
        hv = head + j
        # All that the first token needs is asked for while the row's slot is on its way, before the loop, even of
        # one turn: within a block of code the compiler puts loads off until they are wanted (docs/notes).
        token = load_token(qs, ks, vs, gs, betas, start, h, hv, c, d, K, K_EVEN, V, V_EVEN, CHANNEL)
        rate, bias = load_gate(A_log, dt_bias, hv, c, K, CHANNEL, RAW_GATE, HAS_A, HAS_BIAS)
        written_index = b
        if write_indices is not None:
            written_index = load_index(write_indices, b, 0, write_strides)
        source, tile = tiles_of(pool, initial, hv, w, c, BV, STRIDES)
        first = load_state(source, row_slot, slot_stride, inside & stored)  # [BV, BK]
        if SHORT > 0:
            first = first.to(tl.float32)
        if CONV is not None:
            v_at = 2 * H * K + hv * V
            v_first = load_window(conv_pool, row_slot, conv_stride, v_at, d, V, stored, CONV)
            q_window, k_window, v_window = q_first, k_first, v_first
            tl.debug_barrier()  # nothing is stored before all threads have loaded
        alive = is_row.to(tl.int32)  # the token before is no padding; in a tree bit 0: the row; bit t + 1: token t
        last = first
        for t in range(T):
            if parents is not None:
                parent = tl.load(parents + b.to(tl.int64) * parents_row + t * parents_token)
                known = (parent >= -1) & (parent < t)
                parent = tl.where(known, parent, 30).to(tl.int32)  # whose bit no token has
                slot, live = load_slot(write_indices, b, parent, write_strides, slots, known & (parent >= 0))
                last = tl.where(parent < 0, first, load_state(tile, slot, slot_stride, inside & live))
                if CONV is not None:
                    q_window = load_window(conv_pool, slot, conv_stride, q_at, c, K, live, CONV)
                    k_window = load_window(conv_pool, slot, conv_stride, k_at, c, K, live, CONV)
                    v_window = load_window(conv_pool, slot, conv_stride, v_at, d, V, live, CONV)
                    q_window = tl.where(parent < 0, q_first, q_window)
                    k_window = tl.where(parent < 0, k_first, k_window)
                    v_window = tl.where(parent < 0, v_first, v_window)
            slot, live = row_slot, alive != 0
            if parents is not None:
                live = ((alive >> (parent + 1)) & 1) != 0
            if write_indices is not None:
                slot, live = as_slot(written_index, slots, live)
            qt, kt, vt, a, bt = token
            if not ALONE and t + 1 < T:
                after = start + t + 1
                token = load_token(qs, ks, vs, gs, betas, after, h, hv, c, d, K, K_EVEN, V, V_EVEN, CHANNEL)
                if write_indices is not None:
                    written_index = load_index(write_indices, b, t + 1, write_strides)
            written = live & (t >= first_written)
            if CONV is not None:
                q_window, k_window, v_window = push(q_window, qt), push(k_window, kt), push(v_window, vt)
                if WRITES:  # of q and k the first head writes what all of them read
                    of_all = written & (j == 0)
                    store_window(q_window, conv_pool, slot, conv_stride, q_at, c, K, of_all, CONV)
                    store_window(k_window, conv_pool, slot, conv_stride, k_at, c, K, of_all, CONV)
                    store_window(v_window, conv_pool, slot, conv_stride, v_at, d, V, written, CONV)
                qt = convolve(q_window, conv_weight, conv_bias, q_at, c, K, CONV)
                kt = convolve(k_window, conv_weight, conv_bias, k_at, c, K, CONV)
                vt = convolve(v_window, conv_weight, conv_bias, v_at, d, V, CONV)
            kt, qt, vt, bt = kt.to(tl.float32), qt.to(tl.float32), vt.to(tl.float32), bt.to(tl.float32)
            if RAW_BETA:
                bt = strength(bt, beta_range)
            r_k, r_q = 1.0, scale
            if NORM:
                r_k, r_q = reciprocal_length(kt), scale * reciprocal_length(qt)
            S = last.to(tl.float32) * tl.exp(log_decay(a, rate, bias, lower_bound, CHANNEL, RAW_GATE, BOUNDED))
            u = bt * (vt - r_k * read_by(S, kt)) * r_k  # [BV]
            S = tl.fma(tl.broadcast_to(kt[None, :], S.shape), tl.broadcast_to(u[:, None], S.shape), S)
            ot = r_q * read_by(S, qt)
            if z is not None:
                zt = load_numbers(z, z_strides, row * z_row + (start + t) * z_token, hv, d, V, V_EVEN).to(tl.float32)
                ot = gated_norm(ot, zt, norm_weight, d, eps, V, ACTIVATION)
            ot = tl.where(live, ot, 0.0).to(o.dtype.element_ty)
            tl.store(o + ((row * T + start + t) * HV + hv).to(tl.int64) * V + d, ot, mask=d < V)
            last = S.to(pool.dtype.element_ty)
            if WRITES:
                tl.store(tile + slot.to(tl.int64) * slot_stride, last, mask=inside & written)
            if SHORT > 0:
                last = S
            if parents is None:
                alive = live.to(tl.int32)
            else:
                alive |= live.to(tl.int32) << (t + 1)
                tl.debug_barrier()  # a later token's threads load what this one's stored


def run_decode(c: Call, o: Tensor, *choice: Tile) -> None:
    """``c.more`` are the call's `Slots` and what is `Around`; a prefill's rows are its sequences. No products are
    contracted: how depends on what else is compiled with them."""
    p, x, s, around = c.p, c.x, Slots(*c.more[: len(Slots._fields)]), Around(*c.more[len(Slots._fields) :])
    write, heads = s.write_indices, p.HV // p.H if p.taps else 1
    first_written = p.T - 1 if s.read_indices is None or (write is not None and write.dim() == 1) else 0
    one, beside = alone(p), short(p) > 0 and not p.recurrent  # the kernels of a prefill
    per_token = [counted(y, one) for y in (x.q, x.k, x.v, x.g, x.beta, around.norm_gate)]
    conv = around.conv_pool

    rows = p.N if p.packed else p.B
    slot, *inner = states(p, s.state_pool)
    pointers = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, s.state_pool, s.read_indices, write)
    more = (s.num_accepted_tokens, s.parent_idx, s.has_initial_state, x.cu_seqlens)
    for chosen in choice or decode_tiles(p, c.shape.chip, every(c)):
        programs = rows * (p.HV // heads) * -(-p.V // columns(p, chosen)) + beside
        launch_rule(
            c, decode, (*pointers, *more, *around, o), (programs, 1, 1), chosen,
            p.N, p.T, len(s.state_pool), p.null_slot, 1 if s.read_indices is None else s.read_indices.shape[-1],
            first_written, p.scale, p.lower_bound or 0.0, p.beta_range, p.eps or 0.0, slot,
            0 if conv is None else conv.stride(0),
            *(count for counts, _ in per_token for count in counts),
            *table(s.read_indices), table(s.num_accepted_tokens)[0], *table(write), *table(s.parent_idx),
            table(s.has_initial_state)[0], *(strides for _, strides in per_token),
            HEADS=heads, ALONE=one, STRIDES=tuple(inner), ACTIVATION=p.activation,
            CONV=None if conv is None else (p.taps, p.window, *conv.stride()[1:]), follows=beside, contracts=False,
        )  # fmt: skip


def counted(t: Tensor | None, one: bool) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Strides of (row, token) in units, and of (unit, head, channel)."""
    if t is None:
        return (0, 0), (0, 0, 0)
    row, token, *others = t.stride()
    size = unit(row, token, one)
    return (row // size, token // size), (size, *others)
