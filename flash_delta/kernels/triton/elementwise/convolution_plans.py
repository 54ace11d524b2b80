"""Plans of convolutions: forward and backward, of one tensor or of q, k and v together, and for one token."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from flash_delta.kernels.runtime.chip import Chip, Tile, next_power_of_2
from flash_delta.kernels.runtime.plan import Layout, Making, Plan, Step, has_unit_stride
from flash_delta.kernels.triton.elementwise.convolution import (
    convolve,
    convolve_backward,
    convolve_token,
    count_pieces,
    cut_of,
)
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.problem import ConvolutionProblem, Convolved, ConvolvedHeads

TOKEN = Tile(4, 1, 256)
NO_STRIDES = (0, 0, 0)
ADJOINING = None, None


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
        unchanged = 0.0 if x.initial_state is None else x.initial_state
        final = made.new("final_state", (p.N, p.D, p.W), x.x.dtype, unchanged if empty else None)
    if empty:
        return Plan((), tuple(made), (y, final))
    of_x = _unit(made, x.x)
    pointers = of_x, *_parameters(made, x), y, final, None
    step = _along(p, chip, convolve, x.x.dtype, pointers, ([of_x],), (strides(x.initial_state),), (ADJOINING,))
    return Plan((step,), tuple(made), (y, final))


def plan_convolve_backward(p: ConvolutionProblem, chip: Chip, x: Convolved, after: ConvolutionGradients) -> Plan:
    """The gradients of x, weight, bias and initial_state."""
    made, zero = Making(), 0.0 if 0 in x.x.shape else None
    d = [made.like(f"d{name}", t, zero) for name, t in zip(x._fields[:3], x, strict=False)]
    through = zero if zero is None or after.dfinal is None else after.dfinal  # without tokens
    results = dx, dweight, dbias, dinitial = *d, made.like("dinitial", x.initial_state, through)
    if zero is not None:
        return Plan((), tuple(made), results)
    of_x, dy = _unit(made, x.x), made.like("zeros", x.x, 0.0) if after.dy is None else _unit(made, after.dy)
    rows = p.W + (x.bias is not None)
    shape = count_pieces(p, cut_of("convolve_backward", p, chip, x.x.dtype).BT), rows, p.D
    parts = made.new("parts", shape, torch.float32)
    pointers = of_x, *_parameters(made, x), dy, after.dfinal, dx, dinitial, None, parts
    of_states = strides(x.initial_state), strides(after.dfinal)
    step = _along(p, chip, convolve_backward, x.x.dtype, pointers, ([of_x, dy, dx],), of_states, (ADJOINING, ADJOINING))
    return Plan((step, sum_parts(parts, dweight, dbias)), tuple(made), results)


def plan_convolve_heads(p: ConvolutionProblem, chip: Chip, x: ConvolvedHeads) -> Plan:
    """q, k and v after their convolutions, in one launch."""
    made = Making()
    y = [made.like(f"{name} convolved", t) for name, t in zip("qkv", x, strict=False)]
    if 0 in x.q.shape:
        return Plan((), tuple(made), tuple(y))
    (q, k, v), weights, bounds = _of_heads(made, x)
    pointers = q, weights[0], None, None, bounds, y[0], None, (k, weights[1], y[1], v, weights[2], y[2])
    heads = (pitched((q, k, v)),)
    step = _along(p, chip, convolve, x.q.dtype, pointers, ([q], [k], [v]), (NO_STRIDES,), heads)
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
    (q, k, v), taps, bounds = _of_heads(made, x)
    shape = count_pieces(p, cut_of("convolve_backward", p, chip, x.q.dtype).BT), p.W, p.D
    parts = made.new("parts", shape, torch.float32) if weights else None
    others = k, taps[1], d.dk, to.to_k, v, taps[2], d.dv, to.to_v
    pointers = q, taps[0], None, None, bounds, d.dq, None, to.to_q, None, others, parts
    tensors, heads = tuple(zip((q, k, v), d, to, strict=True)), (pitched((q, k, v)), pitched(to))
    steps = [_along(p, chip, convolve_backward, x.q.dtype, pointers, tensors, (NO_STRIDES, NO_STRIDES), heads)]
    if weights:
        steps += [sum_parts(parts, dweight)]
    return Plan(tuple(steps), tuple(made), (dweight,))


plan_convolve_heads_backward_without_weights = partial(plan_convolve_heads_backward, weights=False)


def plan_convolve_token(p: ConvolutionProblem, chip: Chip, x: Convolved) -> Plan:
    """y for one token of every row, x [N, D] or [N, D, 1]. The state is updated in place."""
    made = Making()
    y, BD = made.like("y", x.x), min(TOKEN.BV, next_power_of_2(p.D))
    if 0 in x.x.shape:
        return Plan((), tuple(made), (y,))
    weight, bias = made.whole(x.weight), made.whole(x.bias)
    arguments = x.x, x.initial_state, weight, bias, y, x.x.strides[:2], x.initial_state.strides, p.D
    constants = {"W": p.W, "BD": BD, "SILU": p.activation is not None}
    step = Step(convolve_token, (p.N * -(-p.D // BD), 1, 1), TOKEN, arguments, constants)
    return Plan((step,), tuple(made), (y,))


def strides(t: Layout | None) -> tuple[int, ...]:
    return NO_STRIDES if t is None else t.stride()[:3]


def unit_of(tensors: Iterable[Layout]) -> int:
    """In how many numbers strides between rows of a batch are counted: 16 if all strides of rows and tokens allow it,
    else 1. Rows without gaps have the same unit for all T."""
    return 1 if any(stride % 16 for t in tensors for stride in t.strides[:2]) else 16


def pitched(tensors: Sequence[Layout]) -> tuple[int | None, int | None]:
    """The width of q's and k's heads [B, T, H, K], and that of v's; None where all adjoin."""
    q, k, v = [None if t.shape[2] < 2 or t.strides[2] == t.shape[3] else t.shape[3] for t in tensors]
    return q or k, v


def _parameters(made: Making, x: Convolved) -> tuple[Layout | None, ...]:
    """The weight, bias, initial state and bounds, all but the state contiguous."""
    return made.whole(x.weight), made.whole(x.bias), x.initial_state, made.whole(x.cu_seqlens)


def _unit(made: Making, t: Layout) -> Layout:
    """A tensor with contiguous channels, as nearly all have."""
    return t if has_unit_stride(t) else made.without_gaps(t)


def _of_heads(made: Making, x: ConvolvedHeads) -> tuple[list[Layout], list[Layout], Layout | None]:
    """q, k and v with contiguous channels in each head, contiguous weights and bounds."""
    *weights, bounds = map(made.whole, x[3:])
    return [_unit(made, t) for t in x[:3]], weights, bounds


def _along(
    p: ConvolutionProblem, chip: Chip, kernel: Any, dtype: torch.dtype, pointers: tuple[Any, ...],
    tensors: tuple[Sequence[Layout], ...], of_states: tuple[tuple[int, ...], ...],
    heads: tuple[tuple[int | None, ...], ...],
) -> Step:  # fmt: skip
    """The launch of programs along the tokens. ``tensors``: x, and in a backward pass dy and dx; those of k and v, if
    there are any. ``of_states``: strides. ``heads``: for x, and for its gradient, the widths of `pitched`."""
    w = cut_of(kernel.__name__, p, chip, dtype)
    constants = {"W": p.W, "BD": w.BD, "G": w.G}
    units = tuple(map(unit_of, zip(*tensors, strict=True)))
    constants |= dict(zip(("HEADS", "DX_HEADS"), heads, strict=False))
    constants |= {"UNITS": units, "PACKED": p.packed, "SILU": p.activation is not None}
    blocks = -(-p.D // w.BD) if not p.DQ else 2 * -(-p.DQ // w.BD) + -(-(p.D - 2 * p.DQ) // w.BD)
    grid = count_pieces(p, w.BT) * blocks, 1, 1
    absent = (None,) * (3 - len(tensors)) * len(units)
    batches = [t.strides[0] // unit for part in tensors for t, unit in zip(part, units, strict=True)]
    of_q, *of_others = ([t.strides[1:3] for t in part] for part in tensors)
    numbers = p.N, p.T, w.BT, *batches, *absent, *of_q, tuple(chain(*chain(*of_others))), *of_states, p.D, p.DQ or None
    return Step(kernel, grid, Tile(w.warps, 1), (*pointers, *numbers), constants)
