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

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.activation import sigmoid
from flash_delta.kernels.device.chunk import find_slot
from flash_delta.kernels.runtime.chip import Chip, Tile, family, next_power_of_2
from flash_delta.kernels.runtime.plan import Layout, Making, Plan, Step, contiguous, has_unit_stride, names_of
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.problem import ConvolutionProblem, Convolved, ConvolvedHeads, Problem


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
def load_input(x, strides, place, state, state_strides, n, t, start, d, mask, W: tl.constexpr):
    """Token t of a sequence's row, in float32. Before the first token it comes from the state, or is 0."""
    value = tl.load(x + t.to(tl.int64) * strides[1] + place, mask=mask & (t >= start), other=0.0).to(tl.float32)
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
def find_channels(D: tl.constexpr, DQ: tl.constexpr, BD: tl.constexpr):
    """The program's slot; 0, 1 or 2 for channels of q, k or v; how many channels these have; the program's own ones.
    q and k have DQ of D channels each. If DQ is D, there is only q, which may be any tensor."""
    BLOCKS: tl.constexpr = (DQ + BD - 1) // BD
    if DQ == D:
        return tl.program_id(0) // BLOCKS, 0, DQ, tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    else:
        ALL: tl.constexpr = 2 * BLOCKS + (D - 2 * DQ + BD - 1) // BD
        slot, block = tl.program_id(0) // ALL, tl.program_id(0) % ALL
        part = tl.minimum(block // BLOCKS, 2)
        return slot, part, of_part(part, DQ, DQ, D - 2 * DQ), (block - part * BLOCKS) * BD + tl.arange(0, BD)


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
    of_q = d if HEADS[0] is None else d // HEADS[0] * strides[2] + d % HEADS[0]
    of_v = d if HEADS[1] is None else d // HEADS[1] * strides[2] + d % HEADS[1]
    return tl.where(part == 2, of_v, of_q)


@triton.jit(do_not_specialize=["N", "T", "BT"])
def convolve(
    x, weight, bias, initial_state, cu_seqlens, y, final_state, others, N, T, BT, x_strides, other_strides,
    state_strides, D: tl.constexpr, DQ: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y and final_state are contiguous: [B, T, D] and [N, D, W]. x may be q. Then ``others`` has k and v, in one tuple
    with their weights and outputs, and there are no states."""
    slot, part, width, d = find_channels(D, DQ, BD)
    if others is not None:
        x, weight, y = tensors_of_part(part, (x, weight, y), others[:3], others[3:])
        x_strides = tensors_of_part(part, x_strides, other_strides[:3], other_strides[3:])
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, BT, PACKED)
    token, inside, live = start + number * BT, d < width, n < N
    known = inside & live  # tokens after the last sequence may have any value
    before = known & (token <= stop)  # a slot may have no tokens; its first token then lies far beyond stop
    x += row.to(tl.int64) * x_strides[0]
    y += row.to(tl.int64) * T * width
    taps, base, place = load_taps(weight, d, inside, W), None, place_of(d, part, x_strides, HEADS)
    if bias is not None:
        base = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    window = []
    for w in tl.static_range(W - 1):
        t = token - (W - 1) + w
        window += [load_input(x, x_strides, place, initial_state, state_strides, n, t, start, d, before, W)]
    for t in range(token, tl.minimum(token + BT, stop), G):
        window += load_group(x, x_strides[1], t, stop, place, known, G)
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
            last = load_input(x, x_strides, place, initial_state, state_strides, n, t, start, d, inside, W)
            at = final_state + (n.to(tl.int64) * D + d) * W + w
            tl.store(at, last.to(final_state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "T", "BT"])
def convolve_backward(
    x, weight, bias, initial_state, cu_seqlens, dy, dfinal, dx, dinitial, others, parts, N, T, BT, x_strides,
    dy_strides, dx_strides, other_strides, state_strides, dfinal_strides, D: tl.constexpr, DQ: tl.constexpr,
    W: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DX_HEADS: tl.constexpr,
    PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dinitial is contiguous. ``parts`` are those of dweight, [slots, W, D], or None if nobody wants it; with a bias
    there is one more row, for dbias. ``others`` as in `convolve`, with the gradients of k's and v's outputs and their
    own ones."""
    slot, part, width, d = find_channels(D, DQ, BD)
    channel = part * DQ + d
    if others is not None:
        x, weight, dy, dx = tensors_of_part(part, (x, weight, dy, dx), others[:4], others[4:])
        q_strides = x_strides + dy_strides + dx_strides
        all_strides = tensors_of_part(part, q_strides, other_strides[:9], other_strides[9:])
        x_strides, dy_strides, dx_strides = all_strides[:3], all_strides[3:6], all_strides[6:]
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, BT, PACKED)
    token, inside, live = start + number * BT, d < width, n < N
    known, end = inside & live, tl.minimum(token + BT, stop)
    before = known & (token <= stop)
    x += row.to(tl.int64) * x_strides[0]
    dy += row.to(tl.int64) * dy_strides[0]
    dx += row.to(tl.int64) * dx_strides[0]
    taps, base = load_taps(weight, d, inside, W), None
    place, dx_place = place_of(d, part, x_strides, HEADS), place_of(d, part, dx_strides, DX_HEADS)
    if bias is not None:
        base = tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    window, dz, dtaps, dbase = [], [], [], tl.zeros([BD], tl.float32)
    for w in tl.static_range(W - 1):
        t = token - (W - 1) + w
        window += [load_input(x, x_strides, place, initial_state, state_strides, n, t, start, d, before, W)]
        dz += [tl.zeros([BD], tl.float32)]
    for _ in tl.static_range(W):
        dtaps += [tl.zeros([BD], tl.float32)]
    steps = tl.where((token < stop) | (number == 0), end - token + W - 1, 0)  # there may be no chunk
    for i in range(0, steps, G):
        t = token + i
        window = window + load_group(x, x_strides[1], t, stop, place, known, G)
        group = load_group(dy, dy_strides[1], t, stop, d, known, G)
        back = dx + (t - (W - 1)).to(tl.int64) * dx_strides[1] + dx_place
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
            tl.store(back + j * dx_strides[1], dinput, mask=inside & (p >= token) & (p < end))
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
    x, state, weight, bias, y, x_strides, state_strides, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One token of every row, x [N, D]. It is shifted into the state, in place. y is contiguous."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    n, d = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
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
TOKEN = Tile(4, 1, 256)
NO_STRIDES = (0, 0, 0)
ADJOINING = None, None


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


class ConvolutionGradients(NamedTuple):
    """The gradients of a convolution's results."""

    dy: Any
    dfinal: Any


class ConvolvedGradients(NamedTuple):
    """The contiguous gradients of q, k and v after their convolutions [B, T, H, K]."""

    dq: Any
    dk: Any
    dv: Any


class Destination(NamedTuple):
    """Where the gradients of q, k and v are written."""

    to_q: Any
    to_k: Any
    to_v: Any


def plan_convolve(p: ConvolutionProblem, chip: Chip, x: Convolved) -> Plan:
    """y [B, T, D] and, if the problem asks for it, the final state [N, D, W]."""
    made, empty = Making(), 0 in x.x.shape
    y, final = made.like("y", x.x), None
    if p.output_final_state:
        unchanged = 0.0 if x.initial_state is None else "initial_state"
        final = made.new("final_state", (p.N, p.D, p.W), x.x.dtype, unchanged if empty else None)
    if empty:
        return Plan((), tuple(made), (y, final))
    of_x, x_strides = _unit(made, "x", x.x)
    pointers = of_x, *_parameters(made, x), y, final, None
    step = _along(p, chip, convolve, x.x.dtype, pointers, (x_strides, (), strides(x.initial_state)), (ADJOINING,))
    return Plan((step,), tuple(made), (y, final))


def plan_convolve_backward(p: ConvolutionProblem, chip: Chip, x: Convolved, after: ConvolutionGradients) -> Plan:
    """The gradients of x, weight, bias and initial_state."""
    made, zero = Making(), 0.0 if 0 in x.x.shape else None
    d = [made.like(f"d{name}", t, zero) for name, t in zip(x._fields[:3], x, strict=False)]
    through = zero if zero is None or after.dfinal is None else "dfinal"  # without tokens
    results = dx, dweight, dbias, dinitial = *d, made.like("dinitial", x.initial_state, through)
    if zero is not None:
        return Plan((), tuple(made), results)
    of_x, x_strides = _unit(made, "x", x.x)
    dy, dy_strides = made.like("zeros", x.x, 0.0), contiguous(x.x.shape)
    if after.dy is not None:
        made.pop()
        dy, dy_strides = _unit(made, "dy", after.dy)
    rows = p.W + (x.bias is not None)
    shape = count_pieces(p, cut_of("convolve_backward", p, chip, x.x.dtype).BT), rows, p.D
    parts, dfinal = made.new("parts", shape, torch.float32), names_of(after)["dfinal"]
    pointers = of_x, *_parameters(made, x), dy, dfinal, dx, dinitial, None, parts
    all_strides = x_strides, dy_strides, contiguous(x.x.shape), (), strides(x.initial_state), strides(after.dfinal)
    step = _along(p, chip, convolve_backward, x.x.dtype, pointers, all_strides, (ADJOINING, ADJOINING))
    return Plan((step, sum_parts(parts, shape, dweight, p.W, dbias)), tuple(made), results)


def plan_convolve_heads(p: ConvolutionProblem, chip: Chip, x: ConvolvedHeads) -> Plan:
    """q, k and v after their convolutions, in one launch."""
    made = Making()
    y = [made.like(f"{name} convolved", t) for name, t in zip("qkv", x, strict=False)]
    if 0 in x.q.shape:
        return Plan((), tuple(made), tuple(y))
    (q, k, v), weights, bounds, layouts = _of_heads(made, x)
    pointers = q, weights[0], None, None, bounds, y[0], None, (k, weights[1], y[1], v, weights[2], y[2])
    of_q, of_k, of_v = (t.strides[:3] for t in layouts)
    all_strides = of_q, (*of_k, *of_v), NO_STRIDES
    step = _along(p, chip, convolve, x.q.dtype, pointers, all_strides, (pitched(layouts),))
    return Plan((step,), tuple(made), tuple(y))


def plan_convolve_heads_backward(
    p: ConvolutionProblem, chip: Chip, x: ConvolvedHeads, d: ConvolvedGradients, to: Destination, *,
    weights: bool = True,
) -> Plan:  # fmt: skip
    """The gradient of all weights [D, W]; those of q, k and v are written where they are wanted."""
    made, empty = Making(), 0 in x.q.shape
    dweight = made.new("dweight", (p.D, p.W), x.q_weight.dtype, 0.0 if empty else None) if weights else None
    if empty:
        return Plan((), tuple(made), (dweight,))
    (q, k, v), taps, bounds, layouts = _of_heads(made, x)
    shape = count_pieces(p, cut_of("convolve_backward", p, chip, x.q.dtype).BT), p.W, p.D
    parts = made.new("parts", shape, torch.float32) if weights else None
    others = k, taps[1], "dk", "to_k", v, taps[2], "dv", "to_v"
    pointers = q, taps[0], None, None, bounds, "dq", None, "to_q", None, others, parts
    of_q, of_k, of_v = ([t.strides[:3] for t in part] for part in zip(layouts, d, to, strict=True))
    all_strides = *of_q, tuple(chain(*of_k, *of_v)), NO_STRIDES, NO_STRIDES
    heads = pitched(layouts), pitched(to)
    steps = [_along(p, chip, convolve_backward, x.q.dtype, pointers, all_strides, heads)]
    if weights:
        steps += [sum_parts(parts, shape, dweight, p.W)]
    return Plan(tuple(steps), tuple(made), (dweight,))


plan_convolve_heads_backward_without_weights = partial(plan_convolve_heads_backward, weights=False)


def plan_convolve_token(p: ConvolutionProblem, chip: Chip, x: Convolved) -> Plan:
    """y for one token of every row, x [N, D] or [N, D, 1]. The state is updated in place."""
    made = Making()
    y, BD = made.like("y", x.x), min(TOKEN.BV, next_power_of_2(p.D))
    if 0 in x.x.shape:
        return Plan((), tuple(made), (y,))
    weight, bias = made.whole("weight", x.weight), made.whole("bias", x.bias)
    arguments = "x", "initial_state", weight, bias, y, x.x.strides[:2], x.initial_state.strides
    constants = {"D": p.D, "W": p.W, "BD": BD, "SILU": p.activation is not None}
    step = Step(convolve_token, (p.N * -(-p.D // BD), 1, 1), TOKEN, arguments, constants)
    return Plan((step,), tuple(made), (y,))


def strides(t: Layout | None) -> tuple[int, ...]:
    return NO_STRIDES if t is None else t.stride()[:3]


def pitched(tensors: Sequence[Layout]) -> tuple[int | None, int | None]:
    """The width of q's and k's heads [B, T, H, K], and that of v's; None where all adjoin."""
    q, k, v = [None if t.shape[2] < 2 or t.strides[2] == t.shape[3] else t.shape[3] for t in tensors]
    return q or k, v


def _parameters(made: Making, x: Convolved) -> tuple[str | None, ...]:
    """The weight, bias, initial state and bounds, all but the state contiguous."""
    state = names_of(x)["initial_state"]
    return made.whole("weight", x.weight), made.whole("bias", x.bias), state, made.whole("cu_seqlens", x.cu_seqlens)


def _unit(made: Making, name: str, t: Layout) -> tuple[str, tuple[int, ...]]:
    """A tensor with contiguous channels, as nearly all have, and its strides."""
    return (name, t.strides) if has_unit_stride(t) else (made.copy(name, t), contiguous(t.shape))


def _of_heads(
    made: Making, x: ConvolvedHeads
) -> tuple[list[str], list[str | None], str | None, list[Layout]]:  # fmt: skip
    """q, k and v with contiguous channels in each head, contiguous weights and bounds; the layouts of q, k and v."""
    found = [_unit(made, name, t) for name, t in zip("qkv", x, strict=False)]
    layouts = [Layout(t.shape, strides, t.dtype) for t, (_, strides) in zip(x, found, strict=False)]
    *weights, bounds = (made.whole(name, t) for name, t in zip(x._fields[3:], x[3:], strict=True))
    return [name for name, _ in found], weights, bounds, layouts


def _along(
    p: ConvolutionProblem, chip: Chip, kernel: Any, dtype: torch.dtype, pointers: tuple[Any, ...],
    all_strides: tuple[tuple[int, ...], ...], heads: tuple[tuple[int | None, ...], ...],
) -> Step:  # fmt: skip
    """The launch of programs along the tokens. ``heads``: for x, and for its gradient, the widths of `pitched`."""
    w = cut_of(kernel.__name__, p, chip, dtype)
    constants = {"D": p.D, "DQ": p.DQ or p.D, "W": p.W, "BD": w.BD, "G": w.G}
    constants |= dict(zip(("HEADS", "DX_HEADS"), heads, strict=False))
    constants |= {"PACKED": p.packed, "SILU": p.activation is not None}
    blocks = -(-p.D // w.BD) if not p.DQ else 2 * -(-p.DQ // w.BD) + -(-(p.D - 2 * p.DQ) // w.BD)
    grid = count_pieces(p, w.BT) * blocks, 1, 1
    return Step(kernel, grid, Tile(w.warps, 1), (*pointers, p.N, p.T, w.BT, *all_strides), constants)
