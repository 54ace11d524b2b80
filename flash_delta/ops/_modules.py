"""The door of what layers do around the rule: short convolution and RMS norm, on "torch" unless another is asked for.

On the backend "torch" they are PyTorch's own operations: autograd and compilers see through them. Kernels are one
autograd Function, and while compiling an operator each (`_modules_library.py`), as the rule's. For the backward pass
nothing is saved but the inputs; a second derivative of kernels is refused.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.ops import _modules_library as library
from flash_delta.ops._backend import choose_backend, load_modules, wished
from flash_delta.problem import Convolution, Convolved, Norm, Normalized


def convolve(
    x: Convolved, activation: str | None, output_final_state: bool, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and the final state ``[N, D, W]`` or None."""
    p = library.describe_convolution(x, "causal_conv1d", activation, output_final_state)
    if _is_traced(backend):
        y, *final = library.convolve(*x, *library.options(p), wished(backend))
        return y, final[0] if output_final_state else None
    module, own = _choose(p, backend)
    return Convolve.apply(p, module, *x) if own and _needs_grad(x) else module.convolve(p, x)


def convolve_token(x: Convolved, activation: str | None, backend: str | None) -> Tensor:
    """Of a token ``x [N, D]`` its y; the state moves on in place, and no gradient reaches it."""
    row = x._replace(x=x.x.unsqueeze(1))
    if _needs_grad(x):
        state = x.initial_state.detach()
        y, final = convolve(row._replace(initial_state=state.clone()), activation, True, backend)
        state.copy_(final.detach())
        return y.squeeze(1)
    p = library.describe_convolution(row, "causal_conv1d_update", activation, True)
    if _is_traced(backend):
        return library.convolve_token(x.x, x.initial_state, x.weight, x.bias, p.op, activation, wished(backend))
    return _choose(p, backend)[0].convolve_token(p, x)


def normalize(x: Normalized, op: str, activation: str | None, eps: float, backend: str | None) -> Tensor:
    """In x's shape and dtype."""
    p = library.describe_norm(x, op, activation, eps)
    if _is_traced(backend):
        return library.normalize(*x, *library.options(p), wished(backend))[0]
    module, own = _choose(p, backend)
    return Normalize.apply(p, module, *x) if own and _needs_grad(x) else module.normalize(p, x)


def _needs_grad(x: Convolved | Normalized) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)


def _choose(p: Convolution | Norm, backend: str | None):
    """A backend's module, and whether it has a backward pass of its own. What a tracer has come to is torch's."""
    name = "torch" if torch.compiler.is_compiling() else choose_backend(p, backend, load_modules)
    return load_modules(name), name != "torch"


def _is_traced(backend: str | None) -> bool:
    """Whether this becomes an operator; PyTorch's own operations the compiler had better see."""
    return torch.compiler.is_compiling() and wished(backend) not in (None, "torch")


class Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Convolution, module, *tensors: Tensor | None):
        ctx.problem, ctx.module = problem, module
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return module.convolve(problem, Convolved(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dfinal: Tensor | None):
        x = Convolved(*ctx.saved_tensors)
        return None, None, *ctx.module.convolve_backward(ctx.problem, x, dy, dfinal)


class Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Norm, module, *tensors: Tensor | None):
        ctx.problem, ctx.module = problem, module
        ctx.save_for_backward(*tensors)
        return module.normalize(problem, Normalized(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return None, None, *ctx.module.normalize_backward(ctx.problem, Normalized(*ctx.saved_tensors), dy)
