"""The short causal convolution of whole sequences, forward and backward, and its step for one token.

    z[t, d] = bias[d] + sum_w weight[d, w] x[t - (W-1) + w, d]        y = z or silu(z)

A program scans through BT tokens of BD channels and keeps the last inputs in registers, so each token is read once. It
loads groups of G tokens, before the group's stores. A compiler does not move a load before a store, which might write
the loaded address. Programs find their tokens as those of chunks do (chunk.find_slot), so each has one sequence only.

The backward pass computes z again, and

    dz = dy or dy silu'(z)      dx[t] = sum_w weight[w] dz[t + (W-1) - w]      dweight[w] = sum_t dz[t] x[t - (W-1) + w]

The scan continues for W - 1 tokens after its own tokens, since their dz contribute. dx of a token is complete W - 1
tokens later. Before a sequence's first token, dx is the gradient of its initial state. ``total`` (total.py) sums the
programs' parts of dweight and dbias, always in the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.activation import sigmoid
from flash_delta.kernels.device.chunk import find_slot
from flash_delta.kernels.runtime.chip import Chip, family, next_power_of_2
from flash_delta.problem import ConvolutionProblem, Problem


@triton.jit
def load_taps(weight, d, inside, W: tl.constexpr):
    taps = []
    for w in tl.static_range(W):
        taps += [tl.load(weight + d * W + w, mask=inside, other=0.0).to(tl.float32)]
    return taps


@triton.jit
def dot(taps, window, bias, W: tl.constexpr):
    z = taps[0] * window[0]
    for w in tl.static_range(1, W):
        z += taps[w] * window[w]
    return z if bias is None else z + bias


@triton.jit
def load_state(state, strides, n, d, i, mask):
    """Input i of a sequence's state, in float32."""
    at = state + n.to(tl.int64) * strides[0] + d.to(tl.int64) * strides[1] + i * strides[2]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_input(x, stride, place, state, state_strides, n, t, start, d, mask, W: tl.constexpr):
    """Token t of a sequence's row, in float32. Before the first token it comes from the state, or is 0."""
    value = tl.load(x + t.to(tl.int64) * stride + place, mask=mask & (t >= start), other=0.0).to(tl.float32)
    if state is not None:
        i = W + t - start
        value += load_state(state, state_strides, n, d, i, mask & (t < start) & (i >= 0))
    return value


@triton.jit
def load_group(x, stride, t, stop, d, inside, G: tl.constexpr, rounded: tl.constexpr = tl.float32):
    """Tokens t to t + G - 1 in float32, ``rounded`` to a dtype; 0 from ``stop`` on."""
    group, at = [], x + tl.cast(t, tl.int64) * stride + d
    for j in tl.static_range(G):
        group += [tl.load(at + j * stride, mask=inside & (t + j < stop), other=0.0)]
    return [numbers.to(rounded).to(tl.float32) for numbers in group]


@triton.jit
def find_channels(D, DQ, BD: tl.constexpr):
    """The program's slot; 0, 1 or 2 for channels of q, k or v; how many channels these have; the program's own ones.
    q and k have DQ of D channels each. If DQ is None, there is only q, which may be any tensor."""
    if DQ is None:
        blocks = tl.cdiv(D, BD)
        return tl.program_id(0) // blocks, 0, D, tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    else:
        blocks = tl.cdiv(DQ, BD)
        every = 2 * blocks + tl.cdiv(D - 2 * DQ, BD)
        slot, block = tl.program_id(0) // every, tl.program_id(0) % every
        part = tl.minimum(block // blocks, 2)
        return slot, part, of_part(part, DQ, DQ, D - 2 * DQ), (block - part * blocks) * BD + tl.arange(0, BD)


@triton.jit
def of_part(part, q, k, v):
    return tl.where(part == 0, q, tl.where(part == 1, k, v))


@triton.jit
def tensors_of_part(part, q, k, v):
    """The tensors of one part. Each of q, k, v is a tuple of the same length."""
    found = ()
    for i in tl.static_range(len(q)):
        found = found + (of_part(part, q[i], k[i], v[i]),)  # noqa: RUF005 (Triton has no starred tuples)
    return found


@triton.jit
def place_of(d, part, strides, HEADS: tl.constexpr):
    """Where channels lie in a token of [B, T, H, K]. HEADS: K of q and k, and that of v; None where heads adjoin."""
    of_q = d if HEADS[0] is None else d // HEADS[0] * strides[1] + d % HEADS[0]
    of_v = d if HEADS[1] is None else d // HEADS[1] * strides[1] + d % HEADS[1]
    return tl.where(part == 2, of_v, of_q)


OF_X = ["x_batch", "k_batch", "v_batch"]  # they depend on T, and no length may compile


@triton.jit(do_not_specialize=["N", "T", "BT", *OF_X])
def convolve(
    x, weight, bias, initial_state, cu_seqlens, y, final_state, others, N, T, BT, x_batch, k_batch, v_batch, x_strides,
    other_strides, state_strides, D, DQ, W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    UNITS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y and final_state are contiguous: [B, T, D] and [N, D, W]. x may be q. Then ``others`` has k and v, in one tuple
    with their weights and outputs, and there are no states. Strides of x are (token, head), and ``x_batch`` counts
    UNITS[0] numbers, from which the compiler knows that loads are aligned."""
    slot, part, width, d = find_channels(D, DQ, BD)
    if others is not None:
        x, weight, y = tensors_of_part(part, (x, weight, y), others[:3], others[3:])
        x_batch = of_part(part, x_batch, k_batch, v_batch)
        x_strides = tensors_of_part(part, x_strides, other_strides[:2], other_strides[2:])
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, BT, PACKED)
    token, inside, live = start + number * BT, d < width, n < N
    known = inside & live  # tokens after the last sequence may have any value
    before = known & (token <= stop)  # a slot may have no tokens; its first token then lies far beyond stop
    x += row.to(tl.int64) * x_batch * UNITS[0]
    y += row.to(tl.int64) * T * width
    taps, base, place = load_taps(weight, d, inside, W), None, place_of(d, part, x_strides, HEADS)
    if bias is not None:
        base = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    window = []
    for w in tl.static_range(W - 1):
        t = token - (W - 1) + w
        window += [load_input(x, x_strides[0], place, initial_state, state_strides, n, t, start, d, before, W)]
    for t in range(token, tl.minimum(token + BT, stop), G):
        window += load_group(x, x_strides[0], t, stop, place, known, G)
        at = y + tl.cast(t, tl.int64) * width + d
        for j in tl.static_range(G):
            z = dot(taps, window[j : j + W], base, W)
            if SILU:
                z *= sigmoid(z)
            if PACKED:
                z = tl.where(live, z, 0.0)
            tl.store(at + j * width, z.to(y.dtype.element_ty), mask=inside & (t + j < stop))
        window = window[G:]
    if final_state is not None and ((number == 0) & live):
        for w in tl.static_range(W):
            t = stop - W + w
            last = load_input(x, x_strides[0], place, initial_state, state_strides, n, t, start, d, inside, W)
            at = final_state + (n.to(tl.int64) * D + d) * W + w
            tl.store(at, last.to(final_state.dtype.element_ty), mask=inside)


OF_GRADIENTS = ["dy_batch", "dx_batch", "dk_batch", "to_k_batch", "dv_batch", "to_v_batch"]


@triton.jit(do_not_specialize=["N", "T", "BT", *OF_X, *OF_GRADIENTS])
def convolve_backward(
    x, weight, bias, initial_state, cu_seqlens, dy, dfinal, dx, dinitial, others, parts, N, T, BT, x_batch, dy_batch,
    dx_batch, k_batch, dk_batch, to_k_batch, v_batch, dv_batch, to_v_batch, x_strides, dy_strides, dx_strides,
    other_strides, state_strides, dfinal_strides, D, DQ, W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, DX_HEADS: tl.constexpr, UNITS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dinitial is contiguous. ``parts`` are those of dweight, [slots, W, D], or None if nobody wants it; with a bias
    there is one more row, for dbias. ``others`` as in `convolve`, with the gradients of k's and v's outputs and their
    own ones."""
    slot, part, width, d = find_channels(D, DQ, BD)
    channel = d
    if others is not None:
        channel += part * DQ
        x, weight, dy, dx = tensors_of_part(part, (x, weight, dy, dx), others[:4], others[4:])
        x_batch, dy_batch, dx_batch = tensors_of_part(
            part, (x_batch, dy_batch, dx_batch), (k_batch, dk_batch, to_k_batch), (v_batch, dv_batch, to_v_batch)
        )
        q_strides = x_strides + dy_strides + dx_strides
        all_strides = tensors_of_part(part, q_strides, other_strides[:6], other_strides[6:])
        x_strides, dy_strides, dx_strides = all_strides[:2], all_strides[2:4], all_strides[4:]
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, BT, PACKED)
    token, inside, live = start + number * BT, d < width, n < N
    known, end = inside & live, tl.minimum(token + BT, stop)
    before = known & (token <= stop)
    x += row.to(tl.int64) * x_batch * UNITS[0]
    dy += row.to(tl.int64) * dy_batch * UNITS[1]
    dx += row.to(tl.int64) * dx_batch * UNITS[2]
    taps, base = load_taps(weight, d, inside, W), None
    place, dx_place = place_of(d, part, x_strides, HEADS), place_of(d, part, dx_strides, DX_HEADS)
    if bias is not None:
        base = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    window, dz, dtaps, dbase = [], [], [], tl.zeros([BD], tl.float32)
    for w in tl.static_range(W - 1):
        t = token - (W - 1) + w
        window += [load_input(x, x_strides[0], place, initial_state, state_strides, n, t, start, d, before, W)]
        dz += [tl.zeros([BD], tl.float32)]
    for _ in tl.static_range(W):
        dtaps += [tl.zeros([BD], tl.float32)]
    steps = tl.where((token < stop) | (number == 0), end - token + W - 1, 0)  # there may be no chunk
    for i in range(0, steps, G):
        t = token + i
        window = window + load_group(x, x_strides[0], t, stop, place, known, G)
        group = load_group(dy, dy_strides[0], t, stop, d, known, G)
        back = dx + (t - (W - 1)).to(tl.int64) * dx_strides[0] + dx_place
        for j in tl.static_range(G):
            new, p = group[j], t + j - (W - 1)
            if SILU:
                z = dot(taps, window[j : j + W], base, W)
                s = sigmoid(z)
                new = new * s * (1.0 + z * (1.0 - s))
            dz += [new]
            own = tl.where(t + j < end, new, 0.0)
            dbase += own
            sums, dinput = [], taps[0] * dz[j + W - 1]
            for w in tl.static_range(W):
                sums += [dtaps[w] + own * window[j + w]]
            for w in tl.static_range(1, W):
                dinput += taps[w] * dz[j + (W - 1) - w]
            dtaps = sums
            if dfinal is not None:
                last = p - (stop - W)
                dinput += load_state(dfinal, dfinal_strides, n, d, last, known & (last >= 0) & (last < W))
            dinput = dinput.to(dx.dtype.element_ty)
            tl.store(back + j * dx_strides[0], dinput, mask=inside & (p >= token) & (p < end))
            if dinitial is not None:
                at = dinitial + (n.to(tl.int64) * D + d) * W + W + p - start
                tl.store(at, dinput.to(dinitial.dtype.element_ty), mask=known & (p < start) & (number == 0))
        window, dz = window[G:], dz[G:]
    if dinitial is not None:  # no output reads the state's oldest input
        oldest = tl.zeros([BD], tl.float32)
        if dfinal is not None:
            oldest = load_state(dfinal, dfinal_strides, n, d, 0, known & (start >= stop))
        at = dinitial + (n.to(tl.int64) * D + d) * W
        tl.store(at, oldest.to(dinitial.dtype.element_ty), mask=known & (number == 0))
    if parts is not None:
        ROWS: tl.constexpr = W if bias is None else W + 1
        at = parts + slot.to(tl.int64) * ROWS * D + channel
        for w in tl.static_range(W):
            tl.store(at + w * D, dtaps[w], mask=inside)
        if bias is not None:
            tl.store(at + W * D, dbase, mask=inside)


@triton.jit
def convolve_token(
    x, state, weight, bias, y, x_strides, state_strides, D, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """One token of every row, x [N, D]. It is shifted into the state, in place. y is contiguous."""
    blocks = tl.cdiv(D, BD)
    n, d = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    inside, taps = d < D, load_taps(weight, d, d < D, W)
    new = tl.load(x + n.to(tl.int64) * x_strides[0] + d * x_strides[1], mask=inside, other=0.0).to(tl.float32)
    window = []
    for w in tl.static_range(1, W):
        window += [load_state(state, state_strides, n, d, w, inside)]
    window += [new]
    z = dot(taps, window, None, W)
    if bias is not None:
        z += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        z *= sigmoid(z)
    tl.debug_barrier()  # other threads overwrite inputs that a thread has to read first
    for w in tl.static_range(W):
        at = state + n.to(tl.int64) * state_strides[0] + d.to(tl.int64) * state_strides[1] + w * state_strides[2]
        tl.store(at, window[w].to(state.dtype.element_ty), mask=inside)
    tl.store(y + n.to(tl.int64) * D + d, z.to(y.dtype.element_ty), mask=inside)


class Cut(NamedTuple):
    """How a convolution is divided among programs."""

    warps: int
    BD: int  # channels of a program
    BT: int  # the most tokens of a program
    G: int  # tokens that are loaded at once


CUTS = {  # a thread has 16 bytes of a row of 16-bit numbers; AMD's warps are twice as wide
    ("convolve", "nvidia"): Cut(2, 256, 32, 8),
    ("convolve", "amd"): Cut(1, 512, 64, 8),
    # With twice the channels a thread's sums spill.
    ("convolve_backward", "nvidia"): Cut(2, 256, 128, 8),
    ("convolve_backward", "amd"): Cut(1, 256, 128, 4),
}
FEWEST, PROGRAMS = 16, 6  # the fewest tokens of a program; the programs that a multiprocessor should have


def choose_cut(kernel: str, chip: Chip, W: int, D: int, dtype: torch.dtype) -> Cut:
    """The cut for W taps and D channels."""
    w = CUTS[kernel, "amd" if family(chip.target) == "gfx942" else "nvidia"]
    much = W > 4 or dtype.itemsize > 2  # whether a thread needs many registers
    BD = min(w.BD // 2 if much else w.BD, next_power_of_2(D))
    return w._replace(BD=BD, G=min(w.G, 4) if W > 4 else w.G)


def cut_of(kernel: str, p: ConvolutionProblem, chip: Chip, dtype: torch.dtype) -> Cut:
    """The cut for a call. A program scans through its tokens one after the other. So if there are few tokens and
    channels, a program gets fewer tokens, until there are enough programs for all multiprocessors. On an H200 the
    backward pass of 1,024 tokens of 2,048 channels then takes 11 us instead of 31. BT is an argument of the
    two kernels, so a new number compiles nothing."""
    w = choose_cut(kernel, chip, p.W, p.D, dtype)
    BT, scanned = w.BT, p.B * p.T * -(-p.D // w.BD)  # the tokens of all programs
    while BT > FEWEST and scanned < PROGRAMS * chip.processors * BT:
        BT //= 2
    return w._replace(BT=BT)


def count_pieces(p: ConvolutionProblem | Problem, BT: int) -> int:
    """The number of programs along the tokens: an upper bound, as for chunks (chunk.count_slots)."""
    return p.T // BT + p.N + 1 if p.packed else p.N * -(-p.T // BT)
