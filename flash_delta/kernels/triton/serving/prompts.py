"""Convolution and norm around the rule for prompts on a pool: one launch before the rule, and one after it.

`convolve_prompts` applies a short convolution and its SiLU (elementwise/convolution.py) to q, k and v of all tokens. It
writes the results, in their dtype, to memory of the call. A program scans through BT tokens of BD channels of q, of k
or of v. Inputs before a sequence's first token are those of its window, in the slot that the sequence reads.

`finish_prompts` applies the gated norm to o in place. A program has ROWS rows of V values. Other programs of it write
windows, each BD channels of one window: the last inputs of a sequence, or those before one of its checkpoints. This
kernel comes last because a sequence may write the slot that it reads. A sequence that is shorter than its window keeps
inputs of the old window. So a program loads everything that it writes before it stores anything.

A window is the first INPUTS inputs of a slot, oldest first. A rolling slot also has room for a draft after its window.
Inputs are rounded to the dtype of the windows' pool before anything is computed with them.

Padding tokens become zeros. Nothing reads q, k and v of tokens that belong to no sequence. The o of both is 0, and
stays 0 for any gate.
"""

from typing import Any

import triton
import triton.language as tl

from flash_delta.kernels.device.activation import sigmoid
from flash_delta.kernels.device.chunk import bounds, find_slot, follow
from flash_delta.kernels.device.slots import load_slot, load_slots
from flash_delta.kernels.runtime.arguments import checkpoint_table, count_checkpoints, launch_rule, table, tokens
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.kernels.triton.elementwise.convolution import (
    Cut,
    choose_cut,
    count_pieces,
    dot,
    load_group,
    load_state,
    load_taps,
)
from flash_delta.kernels.triton.elementwise.convolution_plans import strides
from flash_delta.kernels.triton.elementwise.norm import ROWS, activate, reciprocal_rms, row_tile
from flash_delta.kernels.triton.forward.scan import find_offset
from flash_delta.problem import Around, Inputs, Problem, Slots


@triton.jit
def offsets_of(strides, d, WIDTH: tl.constexpr):
    """The offsets of channels d, where all heads are one axis. Strides are (token, head, channel)."""
    return (d // WIDTH).to(tl.int64) * strides[1] + (d % WIDTH).to(tl.int64) * strides[2]


@triton.jit
def tensor_of(part, q, k, v):
    """Chooses a pointer by a branch, because AMD's compiler cannot choose pointers without one (Triton 3.6)."""
    x = q
    if part == 1:
        x = k
    if part == 2:
        x = v
    return x


@triton.jit
def number_of(part, of_q, of_k, of_v):
    """Chooses a number without a branch, after which the compiler would use another layout than that of loads."""
    return tl.where(part == 0, of_q, tl.where(part == 1, of_k, of_v))


@triton.jit
def find_channels(
    block, q, k, v, q_strides, k_strides, v_strides, H, HV, K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """For a block of channels:

    * whether they belong to q (0), k (1) or v (2),
    * which channels of it they are, and how many it has,
    * how many of all channels come before those of q, k or v,
    * pointers to the first token, and the stride between tokens.
    """
    keys = H * K
    blocks = (keys + BD - 1) // BD
    part = (block >= blocks).to(tl.int32) + (block >= 2 * blocks).to(tl.int32)  # a division would take longer
    d = (block - part * blocks) * BD + tl.arange(0, BD)
    width, zero = tl.where(part == 2, HV * V, keys), block.to(tl.int64) * 0
    offsets = number_of(part, offsets_of(q_strides, d, K), offsets_of(k_strides, d, K), offsets_of(v_strides, d, V))
    token = number_of(part, zero + q_strides[0], zero + k_strides[0], zero + v_strides[0])
    return part, d, width, part * keys, tensor_of(part, q, k, v) + offsets, token


@triton.jit
def load_before(at, stride, windows, strides, slot, stored, t, start, channel, mask, INPUTS: tl.constexpr):
    """The input of token t, rounded as in a window. Before the first token it comes from the window, or is 0."""
    new = tl.load(at + t.to(tl.int64) * stride, mask=mask & (t >= start), other=0.0).to(windows.dtype.element_ty)
    old = load_state(windows, strides, slot, channel, INPUTS + t - start, mask & stored & (t < start))
    return new.to(tl.float32) + old


NUMBERS = ["N", "T", "slots", "null_slot", "read_row", "write_row", "has_row", "blocks", "H", "HV"]  # see decode.py
PROMPT_TOKENS = 64  # of a program that convolves. With other numbers it was not timed
MORE_NUMBERS = [*NUMBERS, "columns", "interval", "checkpoint_row", "checkpoint_column", "eps"]
INDICES = ["read_indices", "write_indices", "has_initial_state"]
MORE_INDICES = [*INDICES, "checkpoint_indices", "checkpoint_offsets"]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def convolve_prompts(
    q, k, v, cu_seqlens, windows, weight, bias, read_indices, write_indices, has_initial_state, q_out, k_out, v_out,
    N, T, slots, null_slot, blocks, read_row, write_row, has_row, q_strides, k_strides, v_strides, window_strides,
    H, HV, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, INPUTS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """``blocks``: the number of blocks of channels of q, k and v together."""
    block = tl.program_id(0) % blocks
    n, _, start, stop, number = find_slot(tl.program_id(0) // blocks, cu_seqlens, N, T, BT, True)
    token = start + number * BT
    if (n >= N) | (token >= stop):
        return
    slot, stored, _, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, (slots, null_slot)
    )
    part, d, width, before, at, stride = find_channels(block, q, k, v, q_strides, k_strides, v_strides, H, HV, K, V, BD)
    channel, inside, to = before + d, d < width, tensor_of(part, q_out, k_out, v_out) + d
    known = inside & well  # padding counts as zeros, and so do its results
    taps, base = load_taps(weight, channel, known, W), None
    if bias is not None:
        base = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    ty: tl.constexpr = windows.dtype.element_ty
    window = []
    for w in tl.static_range(W - 1):
        t = token - (W - 1) + w
        window += [load_before(at, stride, windows, window_strides, slot, stored, t, start, channel, known, INPUTS)]
    for i in range(0, tl.minimum(BT, stop - token), G):
        t = token + i
        window, line = window + load_group(at, stride, t, stop, 0, known, G, ty), to + t.to(tl.int64) * width
        for j in tl.static_range(G):
            z = dot(taps, window[j : j + W], base, W)
            z *= sigmoid(z)
            tl.store(line + j * width, z.to(q_out.dtype.element_ty), mask=inside & (t + j < stop))
        window = window[G:]


@triton.jit
def normalize_rows(
    o, gate, rows, stride, weight, row, M, eps, V: tl.constexpr, BV: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalises some of the M rows of o in place. ``rows``: where their rows of the gate begin. ``stride``: that of
    the gate's channels. OVERLAP: o is ready when the kernel before this one has ended."""
    d = tl.arange(0, BV)
    inside = (row < M)[:, None] & (d < V)[None, :]
    z = tl.load(gate + rows[:, None] + d[None, :] * stride, mask=inside, other=0.0).to(tl.float32)
    act, _ = activate(z, ACTIVATION)
    w = tl.load(weight + d, mask=d < V, other=0.0).to(tl.float32)
    follow(OVERLAP)
    at = o + row.to(tl.int64)[:, None] * V + d[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = x * reciprocal_rms(x, row, M, eps, V)[:, None] * w[None, :] * act
    tl.store(at, tl.where(x == 0.0, 0.0, y).to(o.dtype.element_ty), mask=inside)


@triton.jit
def find_window(
    n, m, cu_seqlens, read_indices, write_indices, has_initial_state, checkpoint_indices, checkpoint_offsets, N, T,
    slots, columns, interval, read_row, write_row, has_row, checkpoint_row, checkpoint_column,
):  # fmt: skip
    """Window m of sequence n: that of checkpoint m, or after all checkpoints that of the sequence's end.

    Returns the sequence's first token; the token after the window; the slot that the sequence reads, and whether it
    does; the slot that is written, and whether it is.
    """
    start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
    read, stored, write, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
    )
    end, live = stop, well & (m >= columns)
    if write_indices is None:
        live = m < 0
    if checkpoint_indices is not None:
        if checkpoint_offsets is None:
            length = (m + 1).to(tl.int64) * interval
            reached, column = (m < columns) & (length <= stop - start), checkpoint_column
        else:
            length, reached = find_offset(checkpoint_offsets, n, checkpoint_column, stop - start)
            reached, column = reached & (m < columns), 0
        slot, kept = load_slot(checkpoint_indices, n, m, (checkpoint_row, column), slots, well & reached)
        end = tl.where(reached, start + tl.where(reached, length, 0).to(tl.int32), stop)
        write, live = tl.where(m < columns, slot, write), live | kept
    return start, end, read, stored, write, live


@triton.jit
def load_window(at, stride, before, step, start, end, inside, stored, INPUTS: tl.constexpr):
    """The last inputs before token ``end``. Those before ``start`` come from the window ``before``, or are 0."""
    ty: tl.constexpr = before.dtype.element_ty
    window = []
    for i in tl.static_range(INPUTS):
        t = end - INPUTS + i
        new = tl.load(at + t.to(tl.int64) * stride, mask=inside & (t >= start), other=0.0).to(ty)
        old = tl.load(before + (INPUTS + t - start) * step, mask=inside & stored & (t < start), other=0.0)
        window += [tl.where(t >= start, new, old)]
    return window


@triton.jit
def store_window(window, to, step, mask, INPUTS: tl.constexpr):
    for i in tl.static_range(INPUTS):
        tl.store(to + i * step, window[i], mask=mask)


@triton.jit(do_not_specialize=MORE_NUMBERS, do_not_specialize_on_alignment=MORE_INDICES)
def finish_prompts(
    o, gate, norm_weight, inputs_q, inputs_k, inputs_v, cu_seqlens, conv_pool, read_indices, write_indices,
    has_initial_state, checkpoint_indices, checkpoint_offsets, N, T, slots, null_slot, columns, interval, blocks,
    read_row, write_row, has_row, checkpoint_row, checkpoint_column, eps, gate_strides, q_strides, k_strides, v_strides,
    window_strides, H, HV, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr, INPUTS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The programs of the norm come first, if there is one. ``columns``: those of the checkpoints' table, or 1 with
    offsets. With offsets one program writes both a sequence's checkpoint and its last window, since the checkpoint may
    be in the slot that the sequence reads."""
    program = tl.program_id(0)
    if gate is not None:
        normed = tl.cdiv(T * HV, ROWS)
        if program < normed:
            row = program * ROWS + tl.arange(0, ROWS)
            at = (row // HV).to(tl.int64) * gate_strides[0] + (row % HV).to(tl.int64) * gate_strides[1]
            normalize_rows(o, gate, at, gate_strides[2], norm_weight, row, T * HV, eps, V, BV, ACTIVATION, False)
            return
        program -= normed
    if conv_pool is not None:
        count = columns
        if checkpoint_offsets is None and write_indices is not None:
            count += 1
        n, m, block = program // blocks // count, program // blocks % count, program % blocks
        start, end, read, stored, write, live = find_window(
            n, m, cu_seqlens, read_indices, write_indices, has_initial_state, checkpoint_indices, checkpoint_offsets,
            N, T, (slots, null_slot), columns, interval, read_row, write_row, has_row, checkpoint_row,
            checkpoint_column,
        )  # fmt: skip
        _, d, width, channels, at, stride = find_channels(
            block, inputs_q, inputs_k, inputs_v, q_strides, k_strides, v_strides, H, HV, K, V, BD
        )
        inside, step = d < width, window_strides[2]
        if checkpoint_offsets is None:
            inside = inside & live
        pool = conv_pool + (channels + d).to(tl.int64) * window_strides[1]
        before = pool + read.to(tl.int64) * window_strides[0]
        window = load_window(at, stride, before, step, start, end, inside, stored, INPUTS)
        if checkpoint_offsets is not None:
            _, stop, _, _, last, well = find_window(
                n, m + 1, cu_seqlens, read_indices, write_indices, has_initial_state, checkpoint_indices,
                checkpoint_offsets, N, T, (slots, null_slot), columns, interval, read_row, write_row, has_row,
                checkpoint_row, checkpoint_column,
            )  # fmt: skip
            latest = load_window(at, stride, before, step, start, stop, inside, stored, INPUTS)
            tl.debug_barrier()
            store_window(latest, pool + last.to(tl.int64) * window_strides[0], step, inside & well, INPUTS)
        tl.debug_barrier()  # other threads overwrite inputs that a thread has to read first
        store_window(window, pool + write.to(tl.int64) * window_strides[0], step, inside & live, INPUTS)


def make_convolved(made: Making, p: Problem) -> tuple[Layout, ...]:
    """Makes memory for q, k and v after the convolution, if there is one. Prompts are one row. Its stride is 0, so that
    no length changes the compiled code of the rule's kernels."""
    tensors = [(name, (p.B, p.T, *size)) for name, size in zip("qkv", sizes_of(p), strict=True) if p.pools.taps]
    laid = (made.new(f"{name} convolved", shape, p.dtype) for name, shape in tensors)
    return tuple(Layout(t.shape, (0, *t.strides[1:]), t.dtype, name=t.name) for t in laid)


def sizes_of(p: Problem) -> tuple[tuple[int, int], ...]:
    """Heads and widths of q, k and v."""
    return (p.H, p.K), (p.H, p.K), (p.HV, p.V)


def with_convolved(x: Inputs, convolved: tuple[Any, ...]) -> Inputs:
    """The inputs of the rule, with q, k and v after the convolution."""
    return x._replace(**dict(zip("qkv", convolved, strict=True))) if convolved else x


def run_before(c: Draft, s: Slots, around: Around, convolved: tuple[Any, ...]) -> Draft:
    """Launches the convolution, if there is one. Returns the call of the rule, without convolution and norm."""
    p, x = c.p, c.x
    if convolved:
        w, blocks = cut_of_prompts(c)
        indices = (s.read_indices, s.write_indices, s.has_initial_state)
        pointers = (*x[:3], x.cu_seqlens, *around[:3], *indices, *convolved)
        launch_rule(
            c, convolve_prompts, pointers, (count_pieces(p, w.BT) * blocks if p.T else 0, 1, 1), Tile(w.warps, 1),
            p.N, p.T, s.state_pool.shape[0], p.pools.null_slot, blocks, *(table(t)[0] for t in indices),
            *(tokens(t) for t in x[:3]), around.conv_pool.stride(),
            W=p.pools.taps, INPUTS=p.pools.window, BT=w.BT, BD=w.BD, G=w.G,
        )  # fmt: skip
    bare = p._replace(pools=p.pools._replace(taps=0, window=0, rolling=False, eps=None, activation=None))
    return c._replace(p=bare, x=with_convolved(x, convolved))


def run_after(c: Draft, s: Slots, around: Around, o: Layout) -> None:
    """Launches the kernel for the norm and for writing windows, if there is a norm or a convolution."""
    p, pools, x = c.p, c.p.pools, c.x
    if not pools.taps and pools.eps is None:
        return
    (BV, rows, t), (w, blocks) = row_tile(p.V, ROWS), cut_of_prompts(c)
    normed = 0 if pools.eps is None else -(-p.T * p.HV // rows)
    columns = count_checkpoints(s)
    windows = columns + (s.write_indices is not None and not pools.checkpoint_offsets)
    written = p.N * windows * blocks if pools.taps else 0
    inputs = x[:3] if pools.taps else (None,) * 3
    indices = (s.read_indices, s.write_indices, s.has_initial_state, s.checkpoint_indices, s.checkpoint_offsets)
    pointers = (o, around.norm_gate, around.norm_weight, *inputs, x.cu_seqlens, around.conv_pool, *indices)
    launch_rule(
        c, finish_prompts, pointers, (normed + written, 1, 1), t,
        p.N, p.T, s.state_pool.shape[0], pools.null_slot, columns, pools.checkpoint_every, blocks,
        *(table(t)[0] for t in indices[:3]), *checkpoint_table(*indices[3:]), pools.eps or 0.0,
        *(tokens(t) for t in (around.norm_gate, *inputs)), strides(around.conv_pool), BV=BV, ROWS=rows,
        ACTIVATION=pools.activation, INPUTS=pools.window, BD=w.BD,
    )  # fmt: skip


def cut_of_prompts(c: Draft) -> tuple[Cut, int]:
    """How the convolution is divided, and the number of blocks of channels of q, k and v."""
    p = c.p
    widths = [heads * width for heads, width in sizes_of(p)]
    w = choose_cut("convolve", c.chip, p.pools.taps, max(widths), p.dtype)._replace(BT=PROMPT_TOKENS)
    return w, sum(-(-width // w.BD) for width in widths)
