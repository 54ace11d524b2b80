"""Plans of decoding and of recurrent ops, and the kernels around `decode`: convolution before it, norm after it.

`convolve_rows` applies a short convolution and its SiLU to q, k and v of all tokens of all rows. A program has BD
channels of q, of k or of v of one row, and goes from token to token. It keeps their window in registers, and writes the
results to memory of the call, in float32. It reads and writes windows by the row's indices, as `decode` reads and
writes states. So `decode` has a program for every head, or for a part of one, for any number of heads that share q and
k.

Windows are written whenever states are: after every token whose slot ``write_indices`` names. In a rolling slot they
are written after every token before the first padding token.

`normalize_outputs` applies the gated norm to o in place. Padding stays 0 for any gate.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, lead
from flash_delta.kernels.device.slots import as_slot, find_column, find_state, load_index, load_slot
from flash_delta.kernels.runtime.arguments import draft_of, launch_rule
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.plan import Draft, Layout, Making, Plan
from flash_delta.kernels.triton.elementwise.norm import row_tile
from flash_delta.kernels.triton.serving.decode import (
    INDICES,
    alone,
    counted,
    first_written_of,
    load_parent,
    rows_of,
    run_decode,
    token_stride,
)
from flash_delta.kernels.triton.serving.prompts import (
    find_channels,
    normalize_rows,
    number_of,
    sizes_of,
    tensor_of,
)
from flash_delta.kernels.triton.serving.ring import find_pages, pages_of, run_decode_on_records
from flash_delta.kernels.triton.serving.window import convolve, load_taps, load_window, push, store_window, window_after
from flash_delta.problem import Around, Inputs, Pools, Problem, Slots

CHANNELS, WARPS = 128, 1  # per program of the convolution
NUMBERS_OF_NORM = 1024  # per program
LIMIT = 2**31  # kernels count the numbers of a tensor of `plan_step` in 32 bits

NUMBERS = [  # see decode.py
    "N", "T", "most", "slots", "written_slots", "null_slot", "columns", "first_written", "q_row", "q_token", "k_row",
    "k_token", "v_row", "v_token", "read_row", "read_column", "accepted_row", "write_row", "write_token", "parents_row",
    "parents_token", "has_row", "pages", "room", "page_row", "from_row", "count_row", "H", "HV",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def convolve_rows(
    q, k, v, read_indices, write_indices, accepted, parents, has_initial_state, ring_write, ring_read, ring_counts,
    cu_seqlens, conv_pool, conv_weight, conv_bias, conv_target, q_out, k_out, v_out, N, T, most, slots, written_slots,
    null_slot, columns, first_written, conv_stride, conv_input, conv_target_stride, conv_target_input,
    conv_step_stride, q_row, q_token, k_row, k_token, v_row, v_token, read_row, read_column, accepted_row, write_row,
    write_token, parents_row, parents_token, has_row, pages, room, page_row, from_row, count_row, q_strides, k_strides,
    v_strides, H, HV, K: tl.constexpr, V: tl.constexpr, CONV: tl.constexpr, CONV_TARGET: tl.constexpr,
    BD: tl.constexpr, WRITES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of channels of q, k and v). Strides are counted as in `decode`. ``slots``: the number of slots
    of ``conv_pool``. ``written_slots``: that of the pool that is written."""
    lead(OVERLAP)
    b, block = tl.program_id(0), tl.program_id(1)
    row, start, slots = b, b * 0, (slots, null_slot)
    targets = slots if written_slots is None else (written_slots, null_slot)
    write_strides = (write_row, write_token)
    if most is not None:
        start, stop, _ = bounds(b, cu_seqlens, N, T, 1, True)
        row, T, first_written = b * 0, stop - start, tl.minimum(first_written, stop - start - 1)
        if most < T:  # padding
            return
    part, d, width, before, at, unit = find_channels(block, q, k, v, q_strides, k_strides, v_strides, H, HV, K, V, BD)
    rows, tokens = number_of(part, q_row, k_row, v_row), number_of(part, q_token, k_token, v_token)
    inside, to = d < width, tensor_of(part, q_out, k_out, v_out) + d
    count = row.to(tl.int64) * rows + start.to(tl.int64) * tokens
    # What needs no index is loaded first. After the barrier its latency would come on top of the window's.
    x = tl.load(at + count * unit, mask=inside & (T > 0), other=0.0)
    taps, base = load_taps(conv_weight, before, d, width, CONV), None
    if conv_bias is not None:
        base = tl.load(conv_bias + before + d, mask=inside, other=0.0)
    row_slot, stored, is_row = find_state(
        read_indices, accepted, has_initial_state, b, read_row, read_column, accepted_row, has_row, columns, slots
    )
    window_slot, column = row_slot, 0
    if CONV[4]:
        column, _ = find_column(accepted, b, accepted_row, columns)
        window_slot, is_row = load_slot(read_indices, b, 0, (read_row, read_column), slots, is_row)
        ring_rows = (page_row, from_row, count_row)
        _, _, _, is_row = find_pages(ring_write, ring_read, ring_counts, b, ring_rows, pages, room, is_row)
        stored = stored & is_row
    windows = (conv_pool, conv_stride, conv_input, None)
    first = load_window(windows, window_slot, column, before, d, width, stored, CONV)
    if conv_target is not None:
        windows = (conv_target, conv_target_stride, conv_target_input, conv_step_stride)
    tl.debug_barrier()  # all threads have to load before anything is stored
    window, alive = first, is_row.to(tl.int32)  # as in `decode`
    for t in range(T):
        if parents is not None:
            parent, known = load_parent(parents, b, t, parents_row, parents_token)
            slot, live = load_slot(write_indices, b, parent, write_strides, targets, known & (parent >= 0))
            window = window_after(parent, first, windows, slot, before, d, width, live, CONV_TARGET)
        slot, live = row_slot, alive != 0 if parents is None else ((alive >> (parent + 1)) & 1) != 0
        if write_indices is not None:
            index = load_index(write_indices, b, t, write_strides)
            slot, live = as_slot(index, targets, live)
        window = push(window, x)
        x = tl.load(at + (count + (t + 1) * tokens) * unit, mask=inside & (t + 1 < T), other=0.0)
        if WRITES:
            written, kept = (window_slot, live) if CONV[4] else (slot, live & (t >= first_written))
            store_window(window, windows, written, t, before, d, width, kept, CONV_TARGET)
        y = convolve(window, taps, base)
        tl.store(to + (row * T + start + t).to(tl.int64) * width, y.to(q_out.dtype.element_ty), mask=inside)
        alive = live.to(tl.int32) if parents is None else alive | (live.to(tl.int32) << (t + 1))
        if parents is not None:
            tl.debug_barrier()  # threads of a later token load what threads of this one stored


@triton.jit(do_not_specialize=["T", "M", "eps", "z_row", "z_token", "HV"])
def normalize_outputs(
    o, z, norm_weight, T, M, eps, z_row, z_token, z_strides, HV, V: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has ROWS of the M rows of o. Strides of the gate z are counted as in `decode`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, t = row // HV // T, row // HV % T
    count = b.to(tl.int64) * z_row + t.to(tl.int64) * z_token
    at = count * z_strides[0] + (row % HV).to(tl.int64) * z_strides[1]
    normalize_rows(o, z, at, z_strides[2], norm_weight, row, M, eps, V, BV, ACTIVATION, OVERLAP)


def plan_decode(
    p: Problem, chip: Chip, x: Inputs, s: Slots, around: Around, *, choice: Tile | None = None
) -> Plan:  # fmt: skip
    """A decoding step, with convolution and norm if they are wanted. The pools are written in place. ``choice``: a tile
    instead of the usual one."""
    c = draft_of(p, chip, x, choice)
    o = c.made.new("o", (p.B, p.T, p.HV, p.V), p.dtype) if s.out is None else s.out
    if p.pools.taps:
        shapes = {name: (p.B, p.T, *size) for name, size in zip("qkv", sizes_of(p), strict=True)}
        convolved = {name: c.made.new(f"{name} convolved", shape, torch.float32) for name, shape in shapes.items()}
        _convolve_rows(c, s, around, convolved.values())
        c = c._replace(x=c.x._replace(**convolved))
    run_rule = run_decode if s.ring_k is None else run_decode_on_records
    run_rule(c, s, o, None if c.every else choice, after=p.pools.taps > 0)
    if p.pools.eps is not None:
        _normalize_outputs(c, around, o)
    return c.plan(o)


def _convolve_rows(c: Draft, s: Slots, around: Around, to: Iterable[Layout]) -> None:
    """``to``: for q, k and v after the convolution."""
    p, x, conv, target, pools = c.p, c.x, around.conv_pool, around.conv_write_pool, c.p.pools
    units = [counted(y, alone(p)) for y in x[:3]]
    blocks = sum(-(-heads * width // CHANNELS) for heads, width in sizes_of(p))
    pointers = (
        *x[:3], s.read_indices, s.write_indices, s.num_accepted_tokens, s.parent_idx, s.has_initial_state, s.ring_write,
        s.ring_read, s.ring_counts, x.cu_seqlens, conv, around.conv_weight, around.conv_bias, target, *to,
    )  # fmt: skip
    launch_rule(
        c, convolve_rows, pointers, (p.N if p.packed else p.B, blocks, 1), Tile(WARPS, 1),
        p.N, p.T, pools.most_tokens or None, s.state_pool.shape[0],
        None if s.write_pool is None else s.write_pool.shape[0], pools.null_slot,
        pools.records or s.read_indices.shape[-1], first_written_of(p, s), *ends_of(conv), *ends_of(target),
        token_stride(target, 3), *(count for counts, _ in units for count in counts), *rows_of(s), *pages_of(s),
        *(strides for _, strides in units), CONV=windows_of(p, conv),
        CONV_TARGET=windows_of(p, conv if target is None else target), BD=CHANNELS,
        WRITES=s.write_indices is not None or s.ring_k is not None, contracts=False,
    )  # fmt: skip


def _normalize_outputs(c: Draft, around: Around, o: Layout) -> None:
    p, (BV, rows, t), M = c.p, row_tile(c.p.V, NUMBERS_OF_NORM), c.p.B * c.p.T * c.p.HV
    counts, strides = counted(around.norm_gate, alone(p))
    launch_rule(
        c, normalize_outputs, (o, around.norm_gate, around.norm_weight), (-(-M // rows), 1, 1), t,
        p.T, M, p.pools.eps, *counts, strides, BV=BV, ROWS=rows, ACTIVATION=p.pools.activation, follows=True,
    )  # fmt: skip


def plan_step(p: Problem, chip: Chip, x: Inputs, *, choice: Tile | None = None) -> Plan:
    """o and the final states of a recurrent op: `decode` from the initial states to a pool of final ones. Without a
    token no row reads its state."""
    made, initial = Making(), x.initial_state
    # A packed row may be longer than its sequences.
    o = made.new("o", (p.B, p.T, p.HV, p.V), p.dtype, 0.0 if p.packed else None)
    unchanged = None if p.T else 0.0 if initial is None else initial
    final = made.new("states", p.state_shape, torch.float32, unchanged)
    if p.T == 0:
        return Plan((), tuple(made), (o, final))
    if x.beta is None and not p.channel_strength:
        x = x._replace(beta=made.new("ones", (p.B, p.T, p.HV), p.dtype, 1.0))
    for name in ("q", "k", "v", "g", "beta", "b", "w"):
        t = getattr(x, name)
        if t is not None and not t.whole and _spans(t) >= LIMIT:
            x = x._replace(**{name: made.without_gaps(t)})
    has = None if initial is not None else made.new("none has one", (p.N,), torch.bool, 0.0)
    if initial is not None and (initial.dtype != torch.float32 or not initial.whole):
        x = x._replace(initial_state=made.new("initial states", initial.shape, torch.float32, initial))
    c = draft_of(p._replace(pools=Pools(dtype=torch.float32)), chip, x, choice, made)
    run_decode(c, Slots(final, None, has_initial_state=has), o, None if c.every else choice)
    return c.plan(o, final)


def _spans(t: Layout) -> int:
    """How many numbers the tensor spans, from its first to its last."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.strides, strict=True))


def windows_of(p: Problem, pool: Layout) -> tuple[int, ...]:
    """The tuple that window.py takes as CONV."""
    channel, step = pool.stride()[-2:]
    return p.pools.taps, p.pools.window, channel, step == 1, p.pools.rolling


def ends_of(pool: Layout | None) -> tuple[int | None, int | None]:
    """Strides of slots and of a window's inputs."""
    return (None, None) if pool is None else (pool.stride(0), pool.stride()[-1])
