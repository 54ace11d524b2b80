"""What a decoding step does around the rule: a short convolution before it, a gated norm after it."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from flash_delta.problem import Around, Inputs, Problem


def convolve(problem: Problem, x: Inputs, t: int, window: Tensor, around: Around) -> tuple[Inputs, Tensor]:
    """Token t alone, its q, k and v after the convolution; and the window ``[B, D, L]`` with it."""
    token = torch.cat([y[:, t].flatten(1) for y in (x.q, x.k, x.v)], 1)  # [B, D]
    inputs = torch.cat([window, token.unsqueeze(2).to(window.dtype)], 2)  # [B, D, L + 1]
    weight = around.conv_weight.to(problem.accumulate)
    y = (inputs[..., -problem.taps :].to(weight.dtype) * weight).sum(2)
    y = silu(y if around.conv_bias is None else y + around.conv_bias.to(weight.dtype))
    keys = problem.H * problem.K
    q, k, v = y.split([keys, keys, problem.HV * problem.V], 1)
    q, k = (key.view(problem.B, 1, problem.H, problem.K) for key in (q, k))
    v = v.view(problem.B, 1, problem.HV, problem.V)
    return x._replace(q=q, k=k, v=v, g=x.g[:, t : t + 1], beta=x.beta[:, t : t + 1]), inputs[..., 1:]


def normalize(problem: Problem, o: Tensor, t: int, around: Around) -> Tensor:
    """``o [B, HV, V]`` of token t."""
    gate = around.norm_gate[:, t].to(o.dtype).contiguous()  # so that bits do not depend on strides, as in step.py
    gate = silu(gate) if problem.activation == "silu" else torch.sigmoid(gate)
    length = (o * o).mean(-1, keepdim=True)
    return o * torch.rsqrt(length + problem.eps) * around.norm_weight.to(o.dtype) * gate
