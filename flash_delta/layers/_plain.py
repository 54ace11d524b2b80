"""Projections that nothing has wrapped or replaced. A layer may use their weights without calling them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from flash_delta.ops._transforms import is_transformed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does no more than the forward function of its class."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


def project_jointly(projections: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """x [B, T, D] through all projections, one after the other on the last axis. None if they want their own calls.

    It is one product, so the gradient of x is not a sum of several. That is worth copying the weights in training, and
    only there. The modules have to be plain `nn.Linear` without bias, and all of them trained or all frozen. Adapters,
    quantised or sharded weights and hooks want their own calls.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or is_transformed():
        return None
    if not all(type(m) is nn.Linear and m.bias is None and is_plain(m) for m in projections):
        return None
    weights = [m.weight for m in projections]
    first = weights[0]
    for weight in weights:
        same = weight.dtype == first.dtype and weight.requires_grad == first.requires_grad
        if not same or isinstance(weight, DTensor):
            return None
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    if torch.compiler.is_compiling():  # a compiler decides by itself what to save
        return F.linear(x, torch.cat(weights))
    return Project.apply(x, *weights)


class Project(torch.autograd.Function):
    """y = x [W_1; ...; W_n]^T. It saves the weights and not their copy, which would be a second model in memory."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.mm(x.flatten(0, 1), torch.cat(weights).t()).view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.flatten(0, 1)
        dx = torch.mm(dy, torch.cat(weights)).view(x.shape)
        if not ctx.needs_input_grad[1]:
            return dx, *[None] * len(weights)
        return dx, *torch.mm(dy.t(), x.flatten(0, 1)).split([len(w) for w in weights])
