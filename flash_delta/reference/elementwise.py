"""The ``torch`` backend for convolution, norm and gate around the rule. Autograd differentiates these functions.

They compute in float32, or in float64 for float64 inputs, and return the inputs' dtype.

States at rest in int8 are here, too. Numbers that share a scale s are a row, and amax is the largest |x| of a row:

    s = amax / 127, rounded so that q s is exact in float32        q = round(x / s)        y = q s
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.problem import (
    ConvolutionProblem,
    Convolved,
    ElementwiseProblem,
    Gated,
    GateProblem,
    Int8Problem,
    KnownCall,
    Normalized,
    NormProblem,
    Resting,
)
from flash_delta.reference.activation import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate
from flash_delta.reference.slots import Use, refuse_shared

MOST = 127  # of q, the numbers of states in int8
SMALLEST = torch.finfo(torch.float32).smallest_normal  # of their scales, except 0


def unsupported(problem: ElementwiseProblem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if isinstance(problem, Int8Problem) and problem.device.type != "cpu":
        return f"it reads the indices of slots on the host, but they are on {problem.device}"
    return None


def preference(problem: ElementwiseProblem) -> tuple[int, str | None]:
    """First on a CPU, last elsewhere."""
    return -1, None


def convolve(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and, if the problem asks for it, the final state ``[N, D, W]``."""
    dtype = torch.promote_types(x.x.dtype, torch.float32)
    weight, bias = x.weight.to(dtype), None if x.bias is None else x.bias.to(dtype)
    history = x.x.new_zeros(p.N, p.D, p.W) if x.initial_state is None else x.initial_state
    history = history.to(dtype).transpose(1, 2)  # [N, W, D]
    if x.cu_seqlens is None:
        row = torch.cat([history, x.x.to(dtype)], dim=1)  # [B, W + T, D]
        y = slide(row[:, 1:], weight, bias)
        last = row[:, x.x.shape[1] :]
    else:
        y, last = _convolve_packed(x.x[0].to(dtype), history, weight, bias, x.cu_seqlens.long())
    y = F.silu(y) if p.activation == "silu" else y
    return y.to(x.x.dtype), last.transpose(1, 2).to(x.x.dtype).contiguous() if p.output_final_state else None


def convolve_backward(
    p: ConvolutionProblem, x: Convolved, dy: Tensor | None, dfinal: Tensor | None, known: KnownCall | None = None
) -> Convolved:
    """The gradients, for callers inside of an autograd Function, where autograd does not record."""
    given = {name: t for name, t in x._asdict().items() if t is not None and name != "cu_seqlens"}

    def run(*tensors: Tensor) -> list[Tensor]:
        found = convolve(p, x._replace(**dict(zip(given, tensors, strict=True))))
        return [t for t in found if t is not None]

    results, differentiate = torch.func.vjp(run, *given.values())
    outer = [torch.zeros_like(t) if d is None else d for t, d in zip(results, (dy, dfinal), strict=False)]
    return Convolved(**dict(zip(given, differentiate(outer), strict=True)))


def convolve_token(p: ConvolutionProblem, x: Convolved, known: KnownCall | None = None) -> Tensor:
    """y for one token ``x [N, D]`` or ``[N, D, 1]`` of every row. ``initial_state`` is updated in place."""
    dtype, state = torch.promote_types(x.x.dtype, torch.float32), x.initial_state
    window = torch.cat([state[..., 1:].to(dtype), x.x.view(*x.x.shape[:2], 1).to(dtype)], dim=-1)  # [N, D, W]
    state.copy_(window.detach())
    y = (window * x.weight.to(dtype)).sum(-1)
    y = y if x.bias is None else y + x.bias.to(dtype)
    y = F.silu(y) if p.activation == "silu" else y
    return y.to(x.x.dtype).view(x.x.shape)


def normalize(p: NormProblem, x: Normalized, known: KnownCall | None = None) -> Tensor:
    wide = x.x.to(torch.promote_types(x.x.dtype, torch.float32))
    y = F.rms_norm(wide, x.weight.shape, x.weight.to(wide.dtype), p.eps)
    if p.activation is not None:
        gate = x.gate.to(y.dtype)
        y = y * (F.silu(gate) if p.activation == "silu" else torch.sigmoid(gate))
    return y.to(p.output_dtype or x.x.dtype)


def normalize_backward(p: NormProblem, x: Normalized, dy: Tensor, known: KnownCall | None = None) -> Normalized:
    """The gradients, for callers inside of an autograd Function, where autograd does not record."""
    given = {name: t for name, t in x._asdict().items() if t is not None}
    _, differentiate = torch.func.vjp(lambda *tensors: normalize(p, Normalized(*tensors)), *given.values())
    return Normalized(**dict(zip(given, differentiate(dy), strict=True)))


def gate(p: GateProblem, x: Gated, known: KnownCall | None = None) -> Tensor:
    if p.gate.bound is not None:
        return naive_kda_lowerbound_gate(*x, p.gate.bound, p.output_dtype)
    return (naive_kda_gate if p.gate.kind == "channel" else naive_gdn_gate)(*x, p.output_dtype)


def round_to_int8(x: Tensor, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns q, and the scales in ``dtype``. Numbers along ``axis`` share one.

    q has 7 bits without its sign. A scale in float32 has 17 bits, and one in bfloat16 has 8. So q s is exact.

    * float32: clearing the last 7 bits of amax / 127 makes it smaller by less than a part in 2^16. So amax / s is from
      127 to 127.002.
    * bfloat16: rounding to nearest changes amax / 127 by at most s / 2^8. So amax / s is from 126.504 to 127.497.

    Either way the largest |q| of a row is exactly 127. If y is rounded again, its amax is 127 s. So the scale and all q
    are the same. The least scale is the smallest normal number. With it q may be smaller, but the scale is the same
    again. Rows whose numbers would all be rounded to 0 have the scale 0. Rows with NaN or infinity have the scale NaN.
    """
    x = x.float()
    amax = x.abs().amax(axis, keepdim=True)
    finite = amax.isfinite()
    s = (amax / MOST).clamp(min=SMALLEST)
    s = (s.view(torch.int32) & -128).view(torch.float32) if dtype == torch.float32 else s.to(dtype)
    s = s.where(amax > SMALLEST / 2, 0).where(finite, torch.nan)
    inverse = 1 / s.float().where(s > 0, 1)
    return (x.where(finite, 0) * inverse).round().to(torch.int8), s


def restore(q: Tensor, s: Tensor) -> Tensor:
    """The states in float32."""
    return q.float() * s.float()


@torch.no_grad()
def move_states(problem: Int8Problem, x: Resting, known: KnownCall | None = None) -> None:
    """Rounds states of the pool to int8, or restores them."""
    read, write = _slots(problem, x)
    if problem.restores:
        x.state_pool[:, write] = restore(x.states[:, read], x.scale[:, read]).to(x.state_pool.dtype)
    else:
        x.states[:, write], x.scale[:, write] = round_to_int8(x.state_pool[:, read], problem.axis, x.scale.dtype)


def slide(row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """row [..., L, D], weight [D, W] -> every full window's weighted sum [..., L - W + 1, D]."""
    W = weight.shape[1]
    windows = row.shape[-2] - W + 1
    # W shifted products keep channels last. On a CPU this is faster than F.conv1d between two transposes, and than
    # unfold.
    y = row[..., :windows, :] * weight[:, 0]
    for w in range(1, W):
        y = torch.addcmul(y, row[..., w : w + windows, :], weight[:, w])
    return y if bias is None else y + bias


def _convolve_packed(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, D], history [N, W, D] -> y [1, T, D], last inputs [N, W, D].

    One long row holds history 0, sequence 0, history 1, sequence 1, ..., so no token's window contains another
    sequence. Tokens after the last sequence form one more sequence. Its history is zeros, and its results are set to 0.
    """
    (T, D), (N, W, _) = x.shape, history.shape
    token = torch.arange(T, device=x.device)
    tap = torch.arange(W, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)  # [T], N after the last sequence
    valid = (sequence < N)[:, None]
    history = F.pad(history, (0, 0, 0, 0, 0, 1))  # [N + 1, W, D]

    end = cu_seqlens + W * torch.arange(1, N + 2, device=x.device)  # [N + 1], after each history
    token_row = token + W * (sequence + 1)  # [T]
    history_row = end[:, None] - W + tap  # [N + 1, W]
    row = x.new_empty(T + (N + 1) * W, D).index_copy(
        0, torch.cat([history_row.flatten(), token_row]), torch.cat([history.flatten(0, 1), x.where(valid, 0)])
    )
    y = slide(row, weight, bias).index_select(0, token_row - (W - 1)).where(valid, 0)
    last_row = history_row[:-1] + (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]  # [N, W]
    return y[None], row.index_select(0, last_row.flatten()).view(N, W, D)


def _slots(problem: Int8Problem, x: Resting) -> tuple[Tensor, Tensor]:
    """The slots that rows read, and those that they write. Raises ValueError if a slot is written twice."""
    source, target = (x.states, x.state_pool) if problem.restores else (x.state_pool, x.states)
    pairs = zip(x.read_indices.tolist(), x.write_indices.tolist(), strict=True)
    limits, null = (source.shape[1], target.shape[1]), problem.null_slot
    live = {
        b: pair for b, pair in enumerate(pairs)
        if all(0 <= slot < limit and slot != null for slot, limit in zip(pair, limits, strict=True))
    }  # fmt: skip
    refuse_shared(problem.op, [Use(b, None, [(write, "write_indices")]) for b, (_, write) in live.items()])
    found = torch.tensor(list(live.values()), dtype=torch.long).view(-1, 2)
    return found[:, 0], found[:, 1]
