"""Stage ``step`` on a pool of states: T tokens for every row of a batch, one after the other.

    S~ = e^g S      u = b (v - S~^T k)      S = S~ + k u^T      o = scale S^T q

With a strength per channel (STRENGTH) u = w . v - S~^T (b . k), and there is no beta.

One program has BV value columns of one value head of one row: grid (B HV V / BV). It reads its part of the row's state
once, and writes it after every token whose slot ``write_indices`` names. It is in registers (token.py). After a
convolution (AFTER, rows.py) a program loads its state while the convolution still runs.

Between tokens the state has the pool's dtype, whether it is written or not. So it does not matter how tokens are split
into calls. Other arguments do not matter either: products are rounded by themselves or are written as ``fma``, and the
compiler fuses none. The compiled code only depends on whether T is 1 (ALONE). The arithmetic is the same in both cases
(tests/test_compiler.py).

With SHORT the rows are packed sequences. The kernel runs sequences of up to SHORT tokens, with float32 states between
tokens like `scan`. Programs of longer sequences exit at once. A sequence without tokens copies its state. This is then
the last kernel of the call. It may run at the same time as the others, since it shares only inputs with them. One more
program, after the last row, waits for them.

With ``most`` the rows are drafts of up to so many tokens, with states of the pool's dtype between tokens. Longer rows
are padding. Programs of one more row write zeros after the last row.

With ``initial`` the rows start from slots of those states, and the pool is only written. It has slots or, with
``step_stride``, rows with a place for the state after every token. Without ``read_indices`` row i reads and writes slot
i.

Only the device knows the indices. An index that names no slot is never used as an address: ``live`` masks loads and
stores.
"""

from math import gcd
from typing import Any

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, follow
from flash_delta.kernels.device.slots import as_slot, find_state, load_index, load_slot
from flash_delta.kernels.runtime.arguments import columns, launch_rule, short, states, table
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout
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
from flash_delta.problem import Problem, Slots


@triton.jit
def state_at(tile, slot, slot_stride, t=0, step=None):
    """The address of a state. ``step``: the stride between the states of a slot, if it has one for every token."""
    at = tile + slot.to(tl.int64) * slot_stride
    return at if step is None else at + t * step


@triton.jit
def load_parent(parents, b, t, parents_row, parents_token):
    """Returns the token that token t continues (-1: the row's state), and whether the index is valid. An invalid index
    becomes 30: bit 31 of ``alive`` in `decode`, which no token has. The first token always continues the row's
    state."""
    parent = tl.load(parents + b.to(tl.int64) * parents_row + t * parents_token)
    parent = tl.where(t == 0, -1, parent)
    known = (parent >= -1) & (parent < t)
    return tl.where(known, parent, 30).to(tl.int32), known


@triton.jit
def load_state(at, live):
    """Loads a state so that it stays in the L2 cache as long as possible. It is usually overwritten soon
    (docs/notes)."""
    return tl.load(at, mask=live, other=0.0, eviction_policy="evict_last")


@triton.jit
def store_zeros(o, start, T, hv, d, HV: tl.constexpr, V: tl.constexpr):
    """Stores zeros for tokens of a packed row."""
    for t in range(T):
        at = o + ((start + t) * HV + hv).to(tl.int64) * V + d
        tl.store(at, tl.zeros(d.shape, o.dtype.element_ty), mask=d < V)


@triton.jit
def find_rows(w, BK: tl.constexpr, BV: tl.constexpr, X: tl.constexpr):
    """The value columns and the channels of the rows of X numbers that a program has of a state."""
    row = tl.arange(0, BK // X * BV)
    return w + row[:, None] % BV, row[:, None] // BV * X + tl.arange(0, X)[None, :]


@triton.jit
def tile_of(pool, hv, d, c, STRIDES: tl.constexpr):
    """Pointers to a head's state in a slot. ``d``, ``c``: from `find_rows`."""
    return pool + hv.to(tl.int64) * STRIDES[0] + (d * STRIDES[2] + c * STRIDES[1])


@triton.jit
def tiles_of(pool, initial, hv, d, c, STRIDES: tl.constexpr, SOURCE: tl.constexpr):
    """The tile from which rows start, and the tile that is written."""
    tile = tile_of(pool, hv, d, c, STRIDES)
    return (tile if initial is None else tile_of(initial, hv, d, c, SOURCE)), tile


NUMBERS = [  # Triton would specialise values of 1 and multiples of 16, in tuples even if told not to
    "N", "T", "most", "slots", "written_slots", "null_slot", "columns", "first_written", "q_row", "q_token", "k_row",
    "k_token", "v_row", "v_token", "g_row", "g_token", "beta_row", "beta_token", "b_row", "b_token", "w_row",
    "w_token", "read_row",
    "read_column", "accepted_row", "write_row", "write_token", "parents_row", "parents_token", "has_row",
]  # fmt: skip
# Servers pass slices of these. For loads of single numbers, alignment does not matter.
INDICES = ["read_indices", "write_indices", "accepted", "parents", "has_initial_state"]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def decode(
    q, k, v, g, beta, b_gate, w_gate, A_log, dt_bias, initial, pool, read_indices, write_indices, accepted, parents,
    has_initial_state,
    cu_seqlens, o,
    N, T, most, slots, written_slots, null_slot, columns, first_written, scale, bound, beta_range,
    source_stride, slot_stride, step_stride,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token, b_row, b_token, w_row,
    w_token,
    read_row, read_column, accepted_row, write_row, write_token, parents_row, parents_token, has_row,
    q_strides, k_strides, v_strides, g_strides, beta_strides, b_strides, w_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    AFTER: tl.constexpr, ROLLING: tl.constexpr, ALONE: tl.constexpr, STRIDES: tl.constexpr, SOURCE: tl.constexpr,
    SHORT: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr,
    STRENGTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``q_row`` and ``q_token`` are the steps from one batch row and from one token to the next, in units of
    ``q_strides[0]`` numbers, and so on (`counted`). ALONE: T is 1. STRIDES: those of (head, key, value) in the pool,
    SOURCE: those in ``initial``. ROLLING: a row without a slot for its window is padding."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    WRITES: tl.constexpr = read_indices is None or write_indices is not None
    K_EVEN: tl.constexpr = K == BK
    V_EVEN: tl.constexpr = V % BV == 0
    program = tl.program_id(0)
    w, hv, b = program % BLOCKS * BV, program // BLOCKS % HV, program // (BLOCKS * HV)
    BITS: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth
    X: tl.constexpr = block_of(BK, STRIDES, BITS)
    HALVINGS: tl.constexpr = halvings_of(STRIDES, BITS)
    h, c, d = hv // (HV // H), channels(BK, X), w + tl.arange(0, BV)
    d_rows, c_rows = find_rows(w, BK, BV, X)
    inside = tl.full(c_rows.shape, True, tl.int1)
    if not (K_EVEN and V_EVEN):
        inside = (d_rows < V) & (c_rows < K)
    row, start, slots = b, b * 0, (slots, null_slot)
    targets = slots if written_slots is None else (written_slots, null_slot)
    write_strides, read_stride = (write_row, write_token), slot_stride if source_stride is None else source_stride
    if SHORT > 0:
        if b == N:  # after the last row, so that this kernel does not end before the others
            follow(OVERLAP)
            return
        start, stop, _ = bounds(b, cu_seqlens, N, T, 1, True)
        row, T, first_written = b * 0, stop - start, stop - start - 1
    elif most is not None:
        start, stop, _ = bounds(b, cu_seqlens, N, T, 1, True)
        row, T, first_written = b * 0, stop - start, tl.minimum(first_written, stop - start - 1)
        if b == N:  # tokens after the last row
            follow(OVERLAP and AFTER)
            store_zeros(o, start, T, hv, d, HV, V)
            return
    # Loaded before programs may end, at the same time as the row's bounds.
    row_slot, stored, is_row = find_state(
        read_indices, accepted, has_initial_state, b, read_row, read_column, accepted_row, has_row, columns, slots
    )
    if most is not None:
        too_long = most < T
        if too_long:
            follow(OVERLAP and AFTER)
            store_zeros(o, start, T, hv, d, HV, V)
            return
    if (T > SHORT and SHORT > 0) or (T < 1 and (SHORT == 0 or not WRITES)):
        follow(OVERLAP and AFTER)
        return
    if SHORT > 0 and WRITES and T < 1:  # the state is copied
        slot, live = row_slot, is_row
        if write_indices is not None:
            slot, live = load_slot(write_indices, b, 0, write_strides, targets, is_row)
        source, tile = tiles_of(pool, initial, hv, d_rows, c_rows, STRIDES, SOURCE)
        last = load_state(state_at(source, row_slot, read_stride), inside & stored)
        tl.store(state_at(tile, slot, slot_stride), last, mask=inside & live)
        return
    if ROLLING:
        _, is_row = load_slot(read_indices, b, 0, (read_row, read_column), slots, is_row)
        stored = stored & is_row
    qs, ks = (q, q_strides, row * q_row, q_token), (k, k_strides, row * k_row, k_token)
    vs, gs = (v, v_strides, row * v_row, v_token), (g, g_strides, row * g_row, g_token)
    betas, bs, ws = (beta, beta_strides, row * beta_row, beta_token), (None,), (None,)
    if STRENGTH:
        bs, ws = (b_gate, b_strides, row * b_row, b_token), (w_gate, w_strides, row * w_row, w_token)
    source, tile = tiles_of(pool, initial, hv, d_rows, c_rows, STRIDES, SOURCE)
    if AFTER:
        first = load_state(state_at(source, row_slot, read_stride), inside & stored)
        follow(OVERLAP)  # q, k and v are ready
    # All that the first token needs is loaded while the row's slot is being loaded. It is loaded before the loop, even
    # if the loop has one iteration, since within a block of code the compiler delays loads until their use
    # (docs/notes).
    token = load_token(qs, ks, gs, betas, bs, start, h, hv, c, K, K_EVEN, CHANNEL)
    values = load_values(vs, ws, start, hv, d, V, V_EVEN)
    rate, bias = load_gate(A_log, dt_bias, hv, c, K, CHANNEL, RAW_GATE, HAS_A, HAS_BIAS)
    gate = (rate, bias, scale, bound, beta_range)
    written_index = b if write_indices is None else load_index(write_indices, b, 0, write_strides)
    if not AFTER:
        first = load_state(state_at(source, row_slot, read_stride), inside & stored)
    if SHORT > 0 or first.dtype != pool.dtype.element_ty:
        first = first.to(tl.float32)
    alive = is_row.to(tl.int32)  # the token before is no padding; in a tree bit 0: the row, bit t + 1: token t
    first = in_blocks(first, BV)
    last = first
    for t in range(T):
        if parents is not None:
            parent, known = load_parent(parents, b, t, parents_row, parents_token)
            slot, live = load_slot(write_indices, b, parent, write_strides, targets, known & (parent >= 0))
            last = load_state(state_at(tile, slot, slot_stride, parent, step_stride), inside & live).to(first.dtype)
            last = tl.where(parent < 0, first, in_blocks(last, BV))
        slot, live = row_slot, alive != 0 if parents is None else ((alive >> (parent + 1)) & 1) != 0
        if write_indices is not None:
            slot, live = as_slot(written_index, targets, live)
        this, its_values = token, values
        if not ALONE and t + 1 < T:
            after = start + t + 1
            token = load_token(qs, ks, gs, betas, bs, after, h, hv, c, K, K_EVEN, CHANNEL)
            values = load_values(vs, ws, after, hv, d, V, V_EVEN)
            if write_indices is not None:
                written_index = load_index(write_indices, b, t + 1, write_strides)
        active = activate(this, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH)
        S, ot, _record = advance(last, active, its_values, RAW_BETA, STRENGTH, HALVINGS)
        ot = tl.where(live, ot, 0.0).to(o.dtype.element_ty)
        tl.store(o + ((row * T + start + t) * HV + hv).to(tl.int64) * V + d, ot, mask=d < V)
        rounded = S.to(pool.dtype.element_ty)
        if WRITES:
            written = live & (t >= first_written)
            tl.store(state_at(tile, slot, slot_stride, t, step_stride), in_rows(rounded), mask=inside & written)
        last = S if SHORT > 0 else rounded.to(first.dtype)
        alive = live.to(tl.int32) if parents is None else alive | (live.to(tl.int32) << (t + 1))
        if parents is not None:
            tl.debug_barrier()  # threads of a later token load what threads of this one stored


def run_decode(c: Draft, s: Slots, o: Layout, choice: Tile | None = None, *, after: bool = False) -> None:
    """Launches `decode`. In a prefill, rows are sequences. ``after``: the convolution is launched before. The compiler
    fuses no products and sums, since its choice would depend on the other code. token.py says which are fused."""
    p, x, pools, apart = c.p, c.x, c.p.pools, s.write_pool is not None
    pool, source = (s.write_pool, s.state_pool) if apart else (s.state_pool, x.initial_state)
    one, beside = alone(p), short(p) > 0 and not p.recurrent  # beside: it runs with the kernels of a prefill
    units = [counted(y, one) for y in (x.q, x.k, x.v, x.g, x.beta)] + [counted_gate(y, one) for y in (x.b, x.w)]
    rows = p.N + (pools.most_tokens > 0) if p.packed else p.B
    slot, *inner = states(p, pool)
    pointers = (
        x.q, x.k, x.v, x.g, x.beta, x.b, x.w, x.A_log, x.dt_bias, source, pool, s.read_indices, s.write_indices,
        s.num_accepted_tokens, s.parent_idx, s.has_initial_state, x.cu_seqlens, o,
    )  # fmt: skip
    for t in decode_tiles(p, c.chip, c.every) if choice is None else (choice,):
        launch_rule(
            c, decode, pointers, (rows * p.HV * -(-p.V // columns(p, t)) + beside, 1, 1), t,
            p.N, p.T, pools.most_tokens or None, s.state_pool.shape[0], pool.shape[0] if apart else None,
            pools.null_slot, 1 if s.read_indices is None else s.read_indices.shape[-1], first_written_of(p, s), p.scale,
            p.gate.bound or 0.0, p.beta_range, source.stride(0) if apart else None, slot,
            token_stride(pool, 4), *(count for counts, _ in units for count in counts), *rows_of(s),
            *(strides for _, strides in units), AFTER=after, ROLLING=pools.rolling, ALONE=one, STRIDES=tuple(inner),
            SOURCE=None if source is None else states(p, source)[1:], follows=beside or after, contracts=False,
        )  # fmt: skip


def counted_gate(t: Layout | None, one: bool, singly: bool = False) -> tuple[tuple[int | None, ...], Any]:
    """Returns `counted`. Without the gate there are no parameters for it."""
    return ((None, None), None) if t is None else counted(t, one, singly)


def first_written_of(p: Problem, s: Slots) -> int:
    """The first token after which a state is written. It is the last token if a row has one slot to write."""
    write, pool = s.write_indices, s.state_pool if s.write_pool is None else s.write_pool
    last_only = s.read_indices is None or (write is not None and write.dim() == 1 and pool.dim() == 4)
    return p.T - 1 if last_only else 0


def rows_of(s: Slots) -> tuple[int, ...]:
    """Strides of the tables of indices."""
    read, write, accepted, parents, has = (
        table(t) for t in (s.read_indices, s.write_indices, s.num_accepted_tokens, s.parent_idx, s.has_initial_state)
    )
    return *read, accepted[0], *write, *parents, has[0]


def token_stride(pool: Layout | Layout | None, axes: int) -> int | None:
    """The stride between tokens in a row of a pool. None if the pool has slots, which hold one state or window."""
    return None if pool is None or pool.dim() == axes else pool.stride(1)


def alone(p: Problem) -> bool:
    """Whether decoding rows have one token. For them `decode` is compiled separately, without a search for more."""
    return p.T == 1 and not p.packed


def unit(row: int, token: int, one: bool) -> int:
    """The unit, up to 16 numbers, in which `decode` counts the strides of rows and tokens. The strides themselves would
    change with T, and the unit usually does not. If rows have one token (``one``), the token's stride may be anything
    and is ignored."""
    return gcd(row, 0 if one else token, 16)


def counted(t: Layout | Layout | None, one: bool, singly: bool = False) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Strides of (row, token) in units, and of (unit, head, channel). ``singly``: tensors without channels are counted
    in single numbers, since their unit would change with the number of heads."""
    if t is None:
        return (0, 0), (0, 0, 0)
    row, token, *others = t.stride()
    size = 1 if singly and len(others) < 2 else unit(row, token, one)
    return (row // size, token // size), (size, *others)
