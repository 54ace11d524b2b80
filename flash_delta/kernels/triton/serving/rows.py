"""Convolution and norm around a decoding step: one launch before `decode`, and one after it.

`convolve_rows` applies a short convolution and its SiLU to q, k and v of all tokens of all rows. A program has BD
channels of q, of k or of v of one row, and goes from token to token. It keeps their window in registers, and writes the
results to memory of the call, in float32. It reads and writes windows by the row's indices, as `decode` reads and
writes states. So `decode` has a program for every head, or for a part of one, for any number of heads that share q and
k.

Windows are written whenever states are: after every token whose slot ``write_indices`` names. In a rolling slot they
are written after every token before the first padding token.

`normalize_outputs` applies the gated norm to o in place. Padding stays 0 for any gate.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device.chunk import bounds, lead
from flash_delta.kernels.device.slots import as_slot, find_column, find_state, load_index, load_slot
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.compile_key import alone
from flash_delta.kernels.triton.elementwise.norm import row_tile
from flash_delta.kernels.triton.serving.decode import (
    INDICES,
    counted,
    first_written_of,
    load_parent,
    opened,
    rows_of,
    run_decode,
    token_stride,
)
from flash_delta.kernels.triton.serving.prompts import (
    find_channels,
    normalize_rows,
    number_of,
    tensor_of,
    with_convolved,
)
from flash_delta.kernels.triton.serving.window import convolve, load_taps, load_window, push, store_window, window_after
from flash_delta.problem import Problem

CHANNELS, WARPS = 128, 1  # per program of the convolution
NUMBERS_OF_NORM = 1024  # per program

NUMBERS = [  # see decode.py
    "N", "T", "most", "slots", "written_slots", "null_slot", "columns", "first_written", "q_row", "q_token", "k_row",
    "k_token", "v_row", "v_token", "read_row", "read_column", "accepted_row", "write_row", "write_token", "parents_row",
    "parents_token", "has_row",
]  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def convolve_rows(
    q, k, v, read_indices, write_indices, accepted, parents, has_initial_state, cu_seqlens, conv_pool, conv_weight,
    conv_bias, conv_target, q_out, k_out, v_out,
    N, T, most, slots, written_slots, null_slot, columns, first_written, conv_stride, conv_target_stride,
    conv_step_stride, q_row, q_token, k_row, k_token, v_row, v_token, read_row, read_column, accepted_row, write_row,
    write_token, parents_row, parents_token, has_row, q_strides, k_strides, v_strides,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CONV: tl.constexpr,
    CONV_TARGET: tl.constexpr, BD: tl.constexpr, BLOCKS: tl.constexpr, WRITES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Strides are counted as in `decode`. BLOCKS: the number of blocks of channels of q, k and v together. ``slots``:
    the number of slots of ``conv_pool``. ``written_slots``: that of the pool that is written."""
    lead(OVERLAP)
    block, b = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
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
        stored = stored & is_row
    windows = (conv_pool, conv_stride, None)
    first = load_window(windows, window_slot, column, before, d, width, stored, CONV)
    if conv_target is not None:
        windows = (conv_target, conv_target_stride, conv_step_stride)
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


@triton.jit(do_not_specialize=["T", "M", "eps", "z_row", "z_token"])
def normalize_outputs(
    o, z, norm_weight, T, M, eps, z_row, z_token, z_strides, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has ROWS of the M rows of o. Strides of the gate z are counted as in `decode`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, t = row // HV // T, row // HV % T
    count = b.to(tl.int64) * z_row + t.to(tl.int64) * z_token
    at = count * z_strides[0] + (row % HV).to(tl.int64) * z_strides[1]
    normalize_rows(o, z, at, z_strides[2], norm_weight, row, M, eps, V, BV, ACTIVATION, OVERLAP)


def run_rows(c: Call, o: Tensor, convolved: tuple[Tensor, ...], *choice: Tile) -> None:
    """Launches a decoding step with convolution and norm. ``convolved``: memory for q, k and v after a convolution."""
    rule = _run_convolve_rows(c, convolved) if convolved else c
    run_decode(rule, o, *choice, after=bool(convolved))
    if c.p.pools.eps is not None:
        _run_normalize_outputs(c, o)


def _run_convolve_rows(c: Call, convolved: tuple[Tensor, ...]) -> Call:
    """Launches the convolution. Returns the call of the rule."""
    p, x, s, around = c.p, c.x, *opened(c)
    apart, conv, target = s.write_pool is not None, around.conv_pool, around.conv_write_pool
    units = [counted(y, alone(p)) for y in x[:3]]
    blocks = sum(-(-width // CHANNELS) for width in (p.H * p.K, p.H * p.K, p.HV * p.V))
    indices = (s.read_indices, s.write_indices, s.num_accepted_tokens, s.parent_idx, s.has_initial_state)
    pointers = (*x[:3], *indices, x.cu_seqlens, conv, around.conv_weight, around.conv_bias, target, *convolved)
    launch_rule(
        c, convolve_rows, pointers, ((p.N if p.packed else p.B) * blocks, 1, 1), Tile(WARPS, 1),
        p.N, p.T, p.pools.most_tokens or None, len(s.state_pool), len(s.write_pool) if apart else None,
        p.pools.null_slot, s.read_indices.shape[-1], first_written_of(c), conv.stride(0),
        None if target is None else target.stride(0), token_stride(target, 3),
        *(count for counts, _ in units for count in counts), *rows_of(s), *(strides for _, strides in units),
        CONV=windows_of(p, conv), CONV_TARGET=windows_of(p, conv if target is None else target), BD=CHANNELS,
        BLOCKS=blocks, WRITES=s.write_indices is not None, contracts=False,
    )  # fmt: skip
    return c._replace(x=with_convolved(x, convolved))


def _run_normalize_outputs(c: Call, o: Tensor) -> None:
    p, around = c.p, opened(c)[1]
    (BV, rows, t), M = row_tile(p.V, NUMBERS_OF_NORM), p.B * p.T * p.HV
    counts, strides = counted(around.norm_gate, alone(p))
    launch_rule(
        c, normalize_outputs, (o, around.norm_gate, around.norm_weight), (-(-M // rows), 1, 1), t,
        p.T, M, p.pools.eps, *counts, strides, BV=BV, ROWS=rows, ACTIVATION=p.pools.activation, follows=True,
    )  # fmt: skip


def windows_of(p: Problem, pool: Tensor) -> tuple[int, ...]:
    """The tuple that window.py takes as CONV."""
    return p.pools.taps, p.pools.window, *pool.stride()[-2:], p.pools.rolling
