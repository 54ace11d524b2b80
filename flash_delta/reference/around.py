"""The short convolution before the rule and the gated norm after it, in serving calls."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from flash_delta.problem import Around, Inputs, Problem
from flash_delta.reference.elementwise import slide
from flash_delta.reference.step import each_alone


def convolve(problem: Problem, x: Inputs, t: int, window: Tensor, around: Around) -> tuple[Inputs, Tensor]:
    """q, k and v of token t after the convolution, and the window ``[B, D, L]`` that includes this token."""
    token = torch.cat([y[:, t].flatten(1) for y in (x.q, x.k, x.v)], 1)  # [B, D]
    inputs = torch.cat([window, token.unsqueeze(2).to(window.dtype)], 2)  # [B, D, L + 1]
    weight = around.conv_weight.to(problem.accumulate)
    y = (inputs[..., -problem.pools.taps :].to(weight.dtype) * weight).sum(2)
    y = each_alone(silu, y if around.conv_bias is None else y + around.conv_bias.to(weight.dtype))
    q, k, v = (heads.unsqueeze(1) for heads in in_heads(problem, y))
    others = {name: y[:, t : t + 1] for name in ("g", "beta", "b", "w") if (y := getattr(x, name)) is not None}
    return x._replace(q=q, k=k, v=v, **others), inputs[..., 1:]


def convolve_prompt(problem: Problem, inputs: Tensor, around: Around) -> Tensor:
    """The last T of inputs ``[W - 1 + T, D]`` after the convolution, in the dtype of q."""
    bias = None if around.conv_bias is None else around.conv_bias.to(problem.accumulate)
    y = slide(inputs.to(problem.accumulate), around.conv_weight.to(problem.accumulate), bias)
    return silu(y).to(problem.dtype)


def in_heads(problem: Problem, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits all channels ``[.., D]`` into q, k and v, each ``[.., heads, width]``."""
    keys = problem.H * problem.K
    q, k, v = y.split([keys, keys, problem.HV * problem.V], 1)
    heads = problem.H, problem.K
    return q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, (problem.HV, problem.V))


def normalize(problem: Problem, o: Tensor, gate: Tensor, around: Around) -> Tensor:
    """The gated norm of ``o``; both are ``[.., HV, V]``. In decoding, each row is computed as if it were alone."""
    gate = gate.to(o.dtype).contiguous()  # bits must not depend on strides, as in step.py
    activate = silu if problem.pools.activation == "silu" else torch.sigmoid
    gate = each_alone(activate, gate) if problem.recurrent else activate(gate)
    length = (o * o).mean(-1, keepdim=True)
    return o * torch.rsqrt(length + problem.pools.eps) * around.norm_weight.to(o.dtype) * gate
