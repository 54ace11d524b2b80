"""Projections that nothing has wrapped or replaced. A layer may use their weights without calling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_delta.ops._transforms import is_transformed

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does no more than the forward function of its class."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


class Projection(NamedTuple):
    """Modules that are called one after the other, and what they project, side by side."""

    parts: tuple[str, ...]
    modules: Sequence[nn.Module]


def project(
    projections: Sequence[Projection], x: Tensor, jointly: bool = True
) -> tuple[list[Tensor], tuple[tuple[str, ...], ...]]:
    """x [B, T, D] through all of them, and what each result has. `nn.Linear` alone are one product, if they may."""
    single = [p for p in projections if len(p.modules) == 1 and isinstance(p.modules[0], nn.Linear)]
    together = project_jointly([p.modules[0] for p in single], x) if jointly and len(single) > 1 else None
    alone = [p for p in projections if together is None or not any(p is q for q in single)]
    results, sources = ([], ()) if together is None else ([together], (sum((p.parts for p in single), ()),))
    for parts, modules in alone:
        y = x
        for module in modules:
            y = module(y)
        results, sources = [*results, y], (*sources, parts)
    return results, sources


def project_jointly(projections: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """x [B, T, D] through all projections, one after the other on the last axis. None if they want their own calls.

    It is one product, so the gradient of x is not a sum of several. That is worth copying the weights in training, and
    only there. Where they adjoin in memory (`let_adjoin`), nothing is copied. The modules have to be plain `nn.Linear`
    without bias, and all of them trained or all frozen. Adapters, quantised or sharded weights and hooks want their own
    calls.
    """
    weights, kind = [m.weight for m in projections if _is_usual(m)], x.device.type
    if len(weights) != len(projections) or is_transformed():
        return None
    autocast, first = kind != "meta" and torch.is_autocast_enabled(kind), weights[0]
    if not (torch.is_grad_enabled() and x.requires_grad) and (autocast or not adjoining(weights)):
        return None
    if any(w.dtype != first.dtype or w.requires_grad != first.requires_grad for w in weights):
        return None
    if autocast:
        dtype = torch.get_autocast_dtype(kind)
        x, weights = x.to(dtype), [w.to(dtype) for w in weights]
    if torch.compiler.is_compiling():  # a compiler decides by itself what to save
        return F.linear(x, torch.cat(weights))
    return Project.apply(x, *weights)


def let_adjoin(projections: Sequence[nn.Module]) -> None:
    """Moves weights to one piece of memory, one after the other, if nothing has replaced or wrapped them."""
    weights = [m.weight for m in projections if _is_usual(m)]
    same = len({(w.dtype, w.device) for w in weights}) == 1 and len(weights) == len(projections)
    if same and not adjoining(weights):
        together = torch.cat([w.detach() for w in weights])
        for weight, part in zip(weights, together.split([len(w) for w in weights]), strict=True):
            weight.data = part


def adjoining(weights: Sequence[Tensor]) -> bool:
    """Whether weights lie one after the other in memory. Compilers do not see that."""
    if torch.compiler.is_compiling() or weights[0].device.type == "meta":
        return False
    memory, place = weights[0].untyped_storage().data_ptr(), weights[0].data_ptr()
    for w in weights:
        if w.data_ptr() != place or w.untyped_storage().data_ptr() != memory or not w.is_contiguous():
            return False
        place += w.numel() * w.element_size()
    return True


def _is_usual(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.bias is not None or not is_plain(module):
        return False
    return type(module.weight) in (nn.Parameter, Tensor)


def _together(weights: Sequence[Tensor]) -> Tensor:
    """All rows of the weights."""
    if adjoining(weights):
        return weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
    return torch.cat(weights)


class Project(torch.autograd.Function):
    """y = x [W_1; ...; W_n]^T. It saves the weights and not their copy, which would be a second model in memory."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.mm(x.flatten(0, 1), _together(weights).t()).view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        dy = dy.flatten(0, 1)
        dx = torch.mm(dy, _together(weights)).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, *[None] * len(weights)
        return dx, *torch.mm(dy.t(), x.flatten(0, 1)).split([len(w) for w in weights])
