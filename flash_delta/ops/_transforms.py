"""Detects tracers, which need only the shapes of a call, and refuses transforms that need other derivatives than the
backward pass. Without the refusal, many of these transforms would silently return zeros."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flash_delta.ops._check.options import refuse

UNWRAPPED = "a tensor outside of torch.func (torch.autograd.grad for grad and vjp, a batch axis for vmap)"
TANGENTLESS = "a tensor without a tangent (forward-mode derivatives are not supported)"


def is_traced(t: Any) -> bool:
    """Whether a call on ``t`` has no values, because torch.compile, torch.export or a FakeTensorMode traces it."""
    return torch.compiler.is_compiling() or isinstance(t, FakeTensor) or (is_in_torch_dispatch_mode() and _is_faked())


def _is_faked() -> bool:
    """Whether every new tensor is a fake one."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_tangents() -> bool:
    """Whether tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether tensors may have tangents or be wrapped by torch.func. Ordinary autograd Functions cannot take these."""
    return has_tangents() or torch._C._are_functorch_transforms_active()


def refuse_transforms(op: str, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raises ValueError for a tensor that torch.func has wrapped, or that has a tangent."""
    if torch.compiler.is_compiling():  # a tracer cannot ask a tensor
        if torch._C._are_functorch_transforms_active():
            refuse(op, names[0], UNWRAPPED, "one inside of it")
        return
    for name, t in zip(names, tensors, strict=True):
        if t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t):
            refuse(op, name, UNWRAPPED, "one inside of it")
        if t is not None and has_tangents() and forward_ad.unpack_dual(t).tangent is not None:
            refuse(op, name, TANGENTLESS, "one with a tangent")


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Wraps ``backward(ctx, saved, *gradients)`` of an autograd Function with a ``ctx.op``. A derivative of the
    gradients is refused. PyTorch's once_differentiable would treat the gradients as constants if the incoming gradient
    is a constant, as that of ``o.sum()``."""

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing lets each tensor be unpacked only once
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *gradients)
        with torch.no_grad():
            found = backward(ctx, saved, *gradients)
        return _Once.apply(ctx.op, len(found), *found, *saved, *gradients)

    return refusing


class _Once(torch.autograd.Function):
    """Returns the first ``count`` tensors. For autograd they depend on all tensors."""

    @staticmethod
    def forward(ctx, op: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.op = op
        return tuple(t.detach() if isinstance(t, Tensor) else None for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_: Any):
        raise RuntimeError(f"{ctx.op}: a second derivative is asked for, and its backward pass has no derivative")
