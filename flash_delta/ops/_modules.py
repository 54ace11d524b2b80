"""The door of what layers do around the rule: short convolution and RMS norm, on the first backend that can.

On the backend "torch" they are PyTorch's own operations: autograd and compilers see through them. Kernels are one
autograd Function, and while compiling an operator each (`_modules_library.py`), as the rule's. For the backward pass
nothing is saved but the inputs; a second derivative of kernels is refused.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.runtime import fastcall
from flash_delta.ops import _modules_library as library
from flash_delta.ops._backend import choose_backend, load_modules, wished
from flash_delta.ops._modules_checks import check_bounds, check_convolution, check_norm, check_token
from flash_delta.ops._remembered import Remembered
from flash_delta.ops._transforms import differentiable_once, has_tangents, is_traced, refuse_transforms
from flash_delta.problem import (
    MOST_TAPS,
    WIDEST_ROW,
    ConvolutionProblem,
    Convolved,
    Normalized,
    NormProblem,
    needs_gradient,
)
from flash_delta.reference import modules as in_torch


class Known(NamedTuple):
    """What is found of a call, and holds for those that differ in their tensors' values only."""

    p: ConvolutionProblem | NormProblem
    module: ModuleType
    needs_grad: bool
    function: bool = False  # it goes through an autograd Function: kernels have no other derivative


_remembered: Remembered[tuple, Known] = Remembered()


def convolve(
    x: Convolved, activation: str | None, output_final_state: bool, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and the final state ``[N, D, W]`` or None."""
    op = "causal_conv1d"
    found = _look_at(_describe_convolution, x, backend, op, activation, output_final_state)
    if x.cu_seqlens is not None and not is_traced(x.x):  # these are values, which no one remembers
        check_bounds(op, x)
    if found.module is library:
        y, *final = library.convolve(*x, *library.options(found.p), wished(backend))
        return y, final[0] if output_final_state else None
    return Convolve.apply(found.p, found.module, *x) if found.function else found.module.convolve(found.p, x)


def convolve_token(x: Convolved, activation: str | None, backend: str | None) -> Tensor:
    """Of a token ``x [N, D]`` its y; the state moves on in place, and no gradient reaches it."""
    p, module, needs_grad, _ = _look_at(_describe_token, x, backend, "causal_conv1d_update", activation)
    if needs_grad:
        state = x.initial_state.detach()
        row = x._replace(x=x.x.unsqueeze(1), initial_state=state.clone())
        y, final = convolve(row, activation, True, backend)
        state.copy_(final.detach())
        return y.squeeze(1)
    if module is library:
        return library.convolve_token(x.x, x.initial_state, x.weight, x.bias, p.op, activation, wished(backend))
    return module.convolve_token(p, x)


def normalize(x: Normalized, op: str, activation: str | None, eps: float, backend: str | None) -> Tensor:
    """In x's shape and dtype."""
    found = _look_at(_describe_norm, x, backend, op, activation, eps)
    if found.module is library:
        return library.normalize(*x, *library.options(found.p), wished(backend))[0]
    return Normalize.apply(found.p, found.module, *x) if found.function else found.module.normalize(found.p, x)


def _look_at(describe: Callable[..., Any], x: Convolved | Normalized, backend: str | None, *options: Any) -> Known:
    """Checks a call, or knows it from an earlier one: on a GPU checks take as long as launches. While compiling its
    module may be `library`, the operators."""
    if is_traced(x.x):
        p = describe(x, *options)
        if not _is_operator(p, backend):
            return Known(p, in_torch, needs_gradient(x))  # which no tracer imports
        refuse_transforms(p.op, x._fields, x)
        return Known(p, library, needs_gradient(x))
    if has_tangents():
        return _describe(describe, x, backend, options)
    try:
        key = (backend, options, fastcall.key(torch.is_grad_enabled(), x))
        found = _remembered[key]
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no number, or wrapped: the checks will name it
        return _describe(describe, x, backend, options)
    if found is None:
        found = _describe(describe, x, backend, options)
        _remembered[key] = found
    return found


def _describe(describe: Callable[..., Any], x: Convolved | Normalized, backend: str | None, options: tuple) -> Known:
    p = describe(x, *options)._replace(memo={})
    name, needs_grad = choose_backend(p, backend, load_modules), needs_gradient(x)
    if name != "torch":
        refuse_transforms(p.op, x._fields, x)
    return Known(p, load_modules(name), needs_grad, needs_grad and name != "torch")


def _describe_convolution(x: Convolved, op: str, activation: str | None, final: bool) -> ConvolutionProblem:
    final = check_convolution(op, x, activation, final)
    return library.describe_convolution(x, op, activation, final)


def _describe_token(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    check_token(op, x, activation)
    return library.describe_convolution(x._replace(x=x.x.unsqueeze(1)), op, activation, True)


def _describe_norm(x: Normalized, op: str, activation: str | None, eps: float) -> NormProblem:
    eps = check_norm(op, x, eps)
    return library.describe_norm(x, op, activation, eps)


def _is_operator(p: ConvolutionProblem | NormProblem, backend: str | None) -> bool:
    """Whether this becomes an operator while compiling; PyTorch's own operations the compiler had better see. Sizes
    decide here as in the backend, which no tracer can ask."""
    wish = wished(backend)
    if wish is not None:
        return wish != "torch"
    fits = p.D <= WIDEST_ROW if isinstance(p, NormProblem) else p.W <= MOST_TAPS
    return p.device.type == "cuda" and p.dtype != torch.float64 and fits


class Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: ConvolutionProblem, module, *tensors: Tensor | None):
        ctx.problem, ctx.module = problem, module
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return module.convolve(problem, Convolved(*tensors))

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor | None, dfinal: Tensor | None):
        return None, None, *ctx.module.convolve_backward(ctx.problem, Convolved(*tensors), dy, dfinal)


class Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: NormProblem, module, *tensors: Tensor | None):
        ctx.problem, ctx.module = problem, module
        ctx.save_for_backward(*tensors)
        return module.normalize(problem, Normalized(*tensors))

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor):
        return None, None, *ctx.module.normalize_backward(ctx.problem, Normalized(*tensors), dy)
