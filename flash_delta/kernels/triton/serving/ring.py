"""Drafts that leave records, in place of a state after each token.

    S_t = round(decay_t S_{t-1} + k_t u_t^T)

The record of a token is k, u and the decay of this equation, in float32. Its state follows without a sum over
channels, with the same bits. Records are in pages of a ring: k [pages, tokens, H, K], u [pages, tokens, HV, V] and the
decay [pages, tokens, HV] or, with a decay per channel, [pages, tokens, HV, K], all without gaps.

`decode_on_records` reads a row's state and applies records of one page to it: those of the draft's tokens that were
accepted. It writes this state once, runs the row's new tokens, and writes their records to another page. Programs are
those of `decode`. But if tokens and records are few, a program holds them, and goes from tile to tile of a head
(`held_tile`). All programs of a head read the same k and decay, so a page cannot be read and written by one call.

`commit` only applies records, for rows of all layers: grid (B HV V / BV, layers). On the way it may leave a second
state, after fewer records.

Only the device knows indices and counts. A row with an index that names no slot or page, or with a count out of range,
is padding.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, follow
from flash_delta.kernels.device.slots import find_state, load_slot
from flash_delta.kernels.runtime.arguments import columns, draft_of, launch_rule, states, table
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.plan import Draft, Layout, Plan
from flash_delta.kernels.triton.serving.decode import (
    alone,
    counted,
    counted_gate,
    find_rows,
    load_state,
    state_at,
    store_zeros,
    tile_of,
)
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
    replay,
)
from flash_delta.kernels.triton.tiles import TOGETHER, held_tile, record_tiles
from flash_delta.problem import Inputs, Problem, Slots


@triton.jit
def find_pages(ring_write, ring_read, ring_counts, b, rows, pages, room, live):
    """The page that a row writes, the page whose records it applies and how many, and whether it is no padding.
    ``rows``: strides of the three tables. ``room``: that of a page."""
    page, begun, count = b * 0, b * 0, b * 0
    if ring_write is not None:
        page, live = load_slot(ring_write, b, 0, (rows[0], 0), (pages, -1), live)
    if ring_read is not None:
        begun, has_page = load_slot(ring_read, b, 0, (rows[1], 0), (pages, -1), live)
        count = tl.load(ring_counts + b.to(tl.int64) * rows[2])
        live = live & ((count == 0) | (has_page & (count > 0) & (count <= room)))
        count = tl.where(live, count, 0).to(tl.int32)
    return page, begun, count, live


@triton.jit
def load_key(ring, page, t, h, hv, c, H, HV, K: tl.constexpr, CHANNEL: tl.constexpr, live):
    """The key and the decay of a head, from record t of a page. ``ring``: the tensors k, u and decay, and the records
    of a page."""
    at = page.to(tl.int64) * ring[3] + t
    k = tl.load(ring[0] + (at * H + h) * K + c, mask=live & (c < K), other=0.0)
    if CHANNEL:
        return k, tl.load(ring[2] + (at * HV + hv) * K + c, mask=live & (c < K), other=0.0)[:, None, :]
    else:
        return k, tl.load(ring[2] + at * HV + hv, mask=live, other=0.0)


@triton.jit
def load_u(ring, page, t, hv, d, HV, V: tl.constexpr, live):
    """u [BV] of a head, from record t of a page."""
    at = page.to(tl.int64) * ring[3] + t
    return tl.load(ring[1] + (at * HV + hv) * V + d, mask=live & (d < V), other=0.0)


@triton.jit
def load_four_keys(ring, page, t, count, h, hv, c, H, HV, K: tl.constexpr, CHANNEL: tl.constexpr):
    """`load_key` of record t and the three after it, as far as the page has so many."""
    first = load_key(ring, page, t, h, hv, c, H, HV, K, CHANNEL, t < count)
    second = load_key(ring, page, t + 1, h, hv, c, H, HV, K, CHANNEL, t + 1 < count)
    third = load_key(ring, page, t + 2, h, hv, c, H, HV, K, CHANNEL, t + 2 < count)
    return first, second, third, load_key(ring, page, t + 3, h, hv, c, H, HV, K, CHANNEL, t + 3 < count)


@triton.jit
def load_four_u(ring, page, t, count, hv, d, HV, V: tl.constexpr):
    """`load_u` of record t and the three after it, as far as the page has so many."""
    first = load_u(ring, page, t, hv, d, HV, V, t < count)
    second = load_u(ring, page, t + 1, hv, d, HV, V, t + 1 < count)
    third = load_u(ring, page, t + 2, hv, d, HV, V, t + 2 < count)
    return first, second, third, load_u(ring, page, t + 3, hv, d, HV, V, t + 3 < count)


@triton.jit
def replay_four(last, keys, u, t, count, ty: tl.constexpr):
    """The state after record t and the three after it, as far as the page has so many."""
    for i in tl.static_range(4):
        if t + i < count:
            last = replay(last, (keys[i][0], u[i], keys[i][1]), ty)
    return last


@triton.jit
def load_four_values(vs, ws, start, T, hv, d, V: tl.constexpr):
    """`load_values` of a row's first four tokens. A shorter row repeats its last token."""
    first = load_values(vs, ws, start, hv, d, V, False)
    second = load_values(vs, ws, start + tl.minimum(1, T - 1), hv, d, V, False)
    third = load_values(vs, ws, start + tl.minimum(2, T - 1), hv, d, V, False)
    return first, second, third, load_values(vs, ws, start + tl.minimum(3, T - 1), hv, d, V, False)


@triton.jit
def activate_four(
    qs, ks, gs, betas, bs, start, T, gate, h, hv, c, K: tl.constexpr, K_EVEN: tl.constexpr, CHANNEL: tl.constexpr,
    RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    """`activate` for the tokens of `load_four_values`."""
    first = load_token(qs, ks, gs, betas, bs, start, h, hv, c, K, K_EVEN, CHANNEL)
    second = load_token(qs, ks, gs, betas, bs, start + tl.minimum(1, T - 1), h, hv, c, K, K_EVEN, CHANNEL)
    third = load_token(qs, ks, gs, betas, bs, start + tl.minimum(2, T - 1), h, hv, c, K, K_EVEN, CHANNEL)
    fourth = load_token(qs, ks, gs, betas, bs, start + tl.minimum(3, T - 1), h, hv, c, K, K_EVEN, CHANNEL)
    return (
        activate(first, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH),
        activate(second, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH),
        activate(third, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH),
        activate(fourth, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH),
    )


@triton.jit
def run_token(
    last, active, values, o, unit, ring, page, t, h, hv, w, c, d, H, HV, GROUP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, CHANNEL: tl.constexpr, RAW_BETA: tl.constexpr, STRENGTH: tl.constexpr, HALVINGS: tl.constexpr,
    ty: tl.constexpr, live,
):  # fmt: skip
    """The state after token t, rounded. Stores the token's output, which is number ``unit``, and its record. Of the
    programs that have the same key or decay, the first one stores it."""
    S, ot, record = advance(last, active, values, RAW_BETA, STRENGTH, HALVINGS)
    ot = tl.where(live, ot, 0.0).to(o.dtype.element_ty)
    tl.store(o + (unit * HV + hv).to(tl.int64) * V + d, ot, mask=d < V)
    at, first = page.to(tl.int64) * ring[3] + t, live & (w == 0)
    tl.store(ring[0] + (at * H + h) * K + c, record[0], mask=first & (hv % GROUP == 0) & (c < K))
    tl.store(ring[1] + (at * HV + hv) * V + d, record[1], mask=live & (d < V))
    if CHANNEL:
        tl.store(ring[2] + (at * HV + hv) * K + c[:, None, :], record[2], mask=first & (c < K)[:, None, :])
    else:
        tl.store(ring[2] + at * HV + hv, record[2], mask=first)
    return S.to(ty).to(tl.float32)


NUMBERS = [  # see decode.py
    "N", "T", "most", "slots", "null_slot", "pages", "room", "q_row", "q_token", "k_row", "k_token", "v_row", "v_token",
    "g_row", "g_token", "beta_row", "beta_token", "b_row", "b_token", "w_row", "w_token", "read_row", "accepted_row",
    "write_row", "page_row", "from_row", "count_row", "tiles",
]  # fmt: skip
INDICES = ["read_indices", "write_indices", "accepted", "ring_write", "ring_read", "ring_counts"]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def decode_on_records(
    q, k, v, g, beta, b_gate, w_gate, A_log, dt_bias, pool, read_indices, write_indices, accepted, ring_k, ring_u,
    ring_decay, ring_write, ring_read, ring_counts, cu_seqlens, o,
    N, T, most, slots, null_slot, scale, bound, beta_range, slot_stride,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token, b_row, b_token, w_row,
    w_token, read_row, accepted_row, write_row, pages, room, page_row, from_row, count_row,
    tiles, q_strides, k_strides, v_strides, g_strides, beta_strides, b_strides, w_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    AFTER: tl.constexpr, STRIDES: tl.constexpr, CHANNEL: tl.constexpr, RAW_GATE: tl.constexpr, BOUNDED: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, RAW_BETA: tl.constexpr, NORM: tl.constexpr, STRENGTH: tl.constexpr,
    OVERLAP: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Parameters are those of `decode`."""
    GROUP: tl.constexpr = HV // H
    K_EVEN: tl.constexpr = K == BK
    V_EVEN: tl.constexpr = V % BV == 0
    parts = (V + BV * tiles - 1) // (BV * tiles)
    program, columns = tl.program_id(0), tl.arange(0, BV)
    w, hv, b = program % parts * (BV * tiles), program // parts % HV, program // (parts * HV)
    TY: tl.constexpr = pool.dtype.element_ty
    X: tl.constexpr = block_of(BK, STRIDES, TY.primitive_bitwidth)
    HALVINGS: tl.constexpr = halvings_of(STRIDES, TY.primitive_bitwidth)
    h, c = hv // GROUP, channels(BK, X)
    row, start, slots = b, b * 0, (slots, null_slot)
    ring = (ring_k, ring_u, ring_decay, room)
    if most is not None:
        start, stop, _ = bounds(b, cu_seqlens, N, T, 1, True)
        row, T = b * 0, stop - start
        if (b == N) | (most < T):  # tokens after the last row, or a row that is padding
            follow(OVERLAP and AFTER)
            for i in range(tiles):
                store_zeros(o, start, T, hv, w + i * BV + columns, HV, V)
            return
    if T < 1:
        follow(OVERLAP and AFTER)
        return
    slot, _, live = find_state(read_indices, accepted, None, b, read_row, 0, accepted_row, 0, room, slots)
    ring_rows = (page_row, from_row, count_row)
    page, begun, count, live = find_pages(ring_write, ring_read, ring_counts, b, ring_rows, pages, room, live)
    stored, target, changed = live, slot, False
    if write_indices is not None:
        target, live = load_slot(write_indices, b, 0, (write_row, 0), slots, live)
        changed = live & ((count > 0) | (target != slot))
    qs, ks = (q, q_strides, row * q_row, q_token), (k, k_strides, row * k_row, k_token)
    vs, gs = (v, v_strides, row * v_row, v_token), (g, g_strides, row * g_row, g_token)
    betas, bs, ws = (beta, beta_strides, row * beta_row, beta_token), (None,), (None,)
    if STRENGTH:
        bs, ws = (b_gate, b_strides, row * b_row, b_token), (w_gate, w_strides, row * w_row, w_token)
    if HELD and ring_read is not None:
        if not CHANNEL:
            keys = load_four_keys(ring, begun, 0, count, h, hv, c, H, HV, K, CHANNEL)
        u = load_four_u(ring, begun, 0, count, hv, w + columns, HV, V)
    follow(OVERLAP and AFTER)  # q, k and v are ready
    rate, bias = load_gate(A_log, dt_bias, hv, c, K, CHANNEL, RAW_GATE, HAS_A, HAS_BIAS)
    gate = (rate, bias, scale, bound, beta_range)
    if HELD:
        tokens = activate_four(
            qs, ks, gs, betas, bs, start, T, gate, h, hv, c, K, K_EVEN, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM,
            STRENGTH,
        )  # fmt: skip
        values = load_four_values(vs, ws, start, T, hv, w + columns, V)
    for i in tl.range(0, tl.minimum(tiles, (V - w + BV - 1) // BV), num_stages=STAGES):
        first = w + i * BV
        d = first + columns
        d_rows, c_rows = find_rows(first, BK, BV, X)
        tile, inside, changes = tile_of(pool, hv, d_rows, c_rows, STRIDES), stored, changed
        if not (K_EVEN and V_EVEN):
            inside, changes = (d_rows < V) & (c_rows < K) & stored, (d_rows < V) & (c_rows < K) & changed
        last = in_blocks(load_state(state_at(tile, slot, slot_stride), inside).to(tl.float32), BV)
        if HELD:  # what the next tile needs besides its state is already on its way
            next_values = load_four_values(vs, ws, start, T, hv, d + BV, V)
            if ring_read is not None:
                next_u = load_four_u(ring, begun, 0, count, hv, d + BV, HV, V)
                if CHANNEL:
                    keys = load_four_keys(ring, begun, 0, count, h, hv, c, H, HV, K, CHANNEL)
                last = replay_four(last, keys, u, 0, count, TY)
                u = next_u
        elif ring_read is not None:
            for t in range(0, count, 4):
                some_keys = load_four_keys(ring, begun, t, count, h, hv, c, H, HV, K, CHANNEL)
                some_u = load_four_u(ring, begun, t, count, hv, d, HV, V)
                last = replay_four(last, some_keys, some_u, t, count, TY)
        if write_indices is not None:
            tl.store(state_at(tile, target, slot_stride), in_rows(last.to(TY)), mask=changes)
        unit = row * T + start
        if HELD:
            for t in tl.static_range(4):
                if t < T:
                    last = run_token(
                        last, tokens[t], values[t], o, unit + t, ring, page, t, h, hv, first, c, d, H, HV, GROUP, K, V,
                        CHANNEL, RAW_BETA, STRENGTH, HALVINGS, TY, live,
                    )  # fmt: skip
            values = next_values
        else:
            token = load_token(qs, ks, gs, betas, bs, start, h, hv, c, K, K_EVEN, CHANNEL)
            its_values = load_values(vs, ws, start, hv, d, V, V_EVEN)
            for t in range(T):
                this, these, later = token, its_values, start + tl.minimum(t + 1, T - 1)
                token = load_token(qs, ks, gs, betas, bs, later, h, hv, c, K, K_EVEN, CHANNEL)
                its_values = load_values(vs, ws, later, hv, d, V, V_EVEN)
                active = activate(this, gate, CHANNEL, RAW_GATE, BOUNDED, RAW_BETA, NORM, STRENGTH)
                last = run_token(
                    last, active, these, o, unit + t, ring, page, t, h, hv, first, c, d, H, HV, GROUP, K, V, CHANNEL,
                    RAW_BETA, STRENGTH, HALVINGS, TY, live,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "slots", "null_slot", "pages", "room", "read_row", "from_row", "count_row", "to_row", "offset_row", "H", "HV",
    ],
    do_not_specialize_on_alignment=["read_indices", "ring_read", "ring_counts", "to", "offsets"],
)  # fmt: skip
def commit(
    pool, ring_k, ring_u, ring_decay, read_indices, ring_read, ring_counts, to, offsets, slots, null_slot, pages, room,
    layer_stride, slot_stride, read_row, from_row, count_row, to_row, offset_row, H, HV, GROUP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDES: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """``to``, ``offsets``: slots for second states, and after how many records."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    program, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, hv, b = program % BLOCKS * BV, program // BLOCKS % HV, program // (BLOCKS * HV)
    X: tl.constexpr = block_of(BK, STRIDES, pool.dtype.element_ty.primitive_bitwidth)
    h, c, d = hv // GROUP, channels(BK, X), w + tl.arange(0, BV)
    d_rows, c_rows = find_rows(w, BK, BV, X)
    inside = (d_rows < V) & (c_rows < K)
    slots, heads, before = (slots, null_slot), layer * pages * room * HV, layer * pages * room * H
    decays = ring_decay + (heads * K if CHANNEL else heads)
    ring = (ring_k + before * K, ring_u + heads * V, decays, room)
    slot, live = load_slot(read_indices, b, 0, (read_row, 0), slots, b >= 0)
    _, page, count, live = find_pages(None, ring_read, ring_counts, b, (0, from_row, count_row), pages, room, live)
    offset, second, wanted = -1, slot, False
    if to is not None:
        offset = tl.load(offsets + b.to(tl.int64) * offset_row).to(tl.int32)
        second, wanted = load_slot(to, b, 0, (to_row, 0), slots, live & (offset >= 0) & (offset <= count))
    if (count > 0) | wanted:
        tile = tile_of(pool + layer * layer_stride, hv, d_rows, c_rows, STRIDES)
        last = in_blocks(load_state(state_at(tile, slot, slot_stride), inside), BV)
        key = load_key(ring, page, 0, h, hv, c, H, HV, K, CHANNEL, count > 0)
        u = load_u(ring, page, 0, hv, d, HV, V, count > 0)
        for t in range(count):
            if to is not None:
                tl.store(state_at(tile, second, slot_stride), in_rows(last), mask=inside & wanted & (t == offset))
            this = key[0], u, key[1]
            key = load_key(ring, page, t + 1, h, hv, c, H, HV, K, CHANNEL, t + 1 < count)
            u = load_u(ring, page, t + 1, hv, d, HV, V, t + 1 < count)
            last = replay(last, this, pool.dtype.element_ty).to(pool.dtype.element_ty)
        if to is not None:
            tl.store(state_at(tile, second, slot_stride), in_rows(last), mask=inside & wanted & (count == offset))
        tl.store(state_at(tile, slot, slot_stride), in_rows(last), mask=inside & (count > 0))


def run_decode_on_records(c: Draft, s: Slots, o: Layout, choice: Tile | None = None, *, after: bool = False) -> None:
    """Launches `decode_on_records`. ``after``: the convolution is launched before."""
    p, x, one = c.p, c.x, alone(c.p)
    units = [counted(y, one) for y in (x.q, x.k, x.v, x.g, x.beta)] + [counted_gate(y, one) for y in (x.b, x.w)]
    indices = s.read_indices, s.num_accepted_tokens, s.write_indices
    rows, (slot, *inner) = p.N + 1 if p.packed else p.B, states(p, s.state_pool)
    pointers = (
        x.q, x.k, x.v, x.g, x.beta, x.b, x.w, x.A_log, x.dt_bias, s.state_pool, s.read_indices, s.write_indices,
        s.num_accepted_tokens, s.ring_k, s.ring_u, s.ring_decay, s.ring_write, s.ring_read, s.ring_counts, x.cu_seqlens,
        o,
    )  # fmt: skip
    held = held_tile(p)
    usual = record_tiles(p, c.chip, c.every) if held is None else (held,)
    for t in usual if choice is None else (choice,):
        blocks = -(-p.V // columns(p, t))
        parts = blocks if held is None else max(1, min(blocks, TOGETHER * c.chip.processors // max(1, rows * p.HV)))
        tiles = -(-blocks // parts)
        launch_rule(
            c, decode_on_records, pointers, (rows * p.HV * -(-blocks // tiles), 1, 1), t,
            p.N, p.T, p.pools.most_tokens or None, s.state_pool.shape[0], p.pools.null_slot, p.scale,
            p.gate.bound or 0.0, p.beta_range, slot, *(count for counts, _ in units for count in counts),
            *(table(i)[0] for i in indices), *pages_of(s), tiles, *(strides for _, strides in units), AFTER=after,
            STRIDES=tuple(inner), HELD=held is not None, STAGES=t.stages, follows=after, contracts=False,
        )  # fmt: skip


def pages_of(s: Slots) -> tuple[int, ...]:
    """The number of pages, the room in each, and strides of the tables of pages and counts."""
    tables = (table(t)[0] for t in (s.ring_write, s.ring_read, s.ring_counts))
    return (*((0, 0) if s.ring_k is None else s.ring_k.shape[:2]), *tables)


def plan_commit(p: Problem, chip: Chip, x: Inputs, s: Slots, *, choice: Tile | None = None) -> Plan:
    """Applies records to the states of all layers, in place. ``x``: k and u of the records, and as g their decays."""
    c, layers = draft_of(p, chip, x, choice), s.state_pool.shape[0]
    indices = (s.read_indices, s.ring_read, s.ring_counts, s.checkpoint_indices, s.checkpoint_offsets)
    _, *inner = states(p, s.state_pool)  # "sequences" are layers here
    for t in record_tiles(p, c.chip, c.every) if c.every or choice is None else (choice,):
        launch_rule(
            c, commit, (s.state_pool, x.k, x.v, x.g, *indices), (p.B * p.HV * -(-p.V // columns(p, t)), layers, 1), t,
            s.state_pool.shape[1], p.pools.null_slot, *x.k.shape[1:3], s.state_pool.stride(0), s.state_pool.stride(1),
            *(table(i)[0] for i in indices), STRIDES=tuple(inner), contracts=False,
        )  # fmt: skip
    return c.plan()
