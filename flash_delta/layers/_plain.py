"""Modules that nothing has wrapped or replaced, so that a layer may use their parameters without calling them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does no more than the forward function of its class."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


def joint_weights(projections: Sequence[nn.Module], x: Tensor) -> list[Tensor] | None:
    """The weights of projections, if one product with all of them is worth it, else None.

    A product with joint weights copies them first. So it is worth it in training only, where the sum of the gradients
    of x would cost more. The modules have to be plain `nn.Linear` without bias. Adapters, quantised or sharded weights
    and hooks want their own calls.
    """
    weights = [m.weight for m in projections]
    first = weights[0]
    if not (torch.is_grad_enabled() and first.requires_grad and x.requires_grad):
        return None
    for module, weight in zip(projections, weights, strict=True):
        same = weight.dtype == first.dtype and weight.requires_grad and not isinstance(weight, DTensor)
        if type(module) is not nn.Linear or module.bias is not None or not is_plain(module) or not same:
            return None
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # joint weights would be cast anew, and not from autocast's memory
        dtype = torch.get_autocast_dtype(kind)
        return [w.to(dtype) for w in weights]
    return weights
