"""Short convolution, RMS norm and gate around the rule, on the first backend that can run them.

On the backend "torch" they are PyTorch's own operations, which autograd and compilers can follow. With kernels, each is
an autograd Function, or under torch.compile an operator (`_operators/elementwise.py`), like the rule. Only inputs are
saved for the backward pass. A second derivative of kernels is refused.
"""

from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_elementwise, wished
from flash_delta.ops._check.elementwise import (
    check_bounds,
    check_convolution,
    check_gate,
    check_norm,
    check_token,
    describe_convolution,
    describe_gate,
    describe_norm,
    describe_token,
)
from flash_delta.ops._known_calls import look_at, recall
from flash_delta.ops._operators import elementwise as operators
from flash_delta.ops._operators.define import take
from flash_delta.ops._transforms import differentiable_once, has_tangents, is_traced, refuse_transforms
from flash_delta.problem import (
    ConvolutionProblem,
    Convolved,
    ElementwiseInputs,
    ElementwiseProblem,
    Form,
    Gated,
    GateProblem,
    KnownCall,
    Normalized,
    NormProblem,
    needs_gradient,
)
from flash_delta.reference import elementwise as in_torch


def convolve(
    x: Convolved, activation: str | None, output_final_state: bool, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """y ``[B, T, D]`` and the final state ``[N, D, W]`` or None."""
    given = (backend, _describe_convolution, "causal_conv1d", activation, output_final_state)
    known = recall(given, x)
    if known is None:
        if is_traced(x.x):
            p = _describe(given, x)
            if not operators.takes(p, x, backend):
                return in_torch.convolve(p, x)
            y, *final = operators.convolve(*x, *take(p, operators.ConvolutionFields), wished(backend))
            return y, final[0] if output_final_state else None
        known = _look_at(given, x)
    if x.cu_seqlens is not None:  # a known call does not remember these values
        check_bounds("causal_conv1d", x)
    if _differentiates(known):
        return Convolve.apply(known, *x)
    return known.backend.convolve(known.problem, x, known)


def convolve_backward(x: Convolved, activation: str | None, dy: Tensor | None, dfinal: Tensor | None) -> Convolved:
    """The gradients of `convolve`, without autograd."""
    known = _look_at((None, _describe_convolution, "causal_conv1d", activation, dfinal is not None), x)
    return known.backend.convolve_backward(known.problem, x, dy, dfinal, known)


def convolve_token(x: Convolved, activation: str | None, backend: str | None) -> Tensor:
    """y for one token ``x [N, D]``. The state is updated in place and gets no gradient."""
    given = (backend, _describe_token, "causal_conv1d_update", activation)
    known = recall(given, x)
    if known is not None and not known.needs_grad:
        return known.backend.convolve_token(known.problem, x, known)
    traced = is_traced(x.x)
    known = None if traced else _look_at(given, x)
    if needs_gradient(x) if traced else known.needs_grad:
        state = x.initial_state.detach()
        row = x._replace(x=x.x.unsqueeze(1), initial_state=state.clone())
        y, final = convolve(row, activation, True, backend)
        state.copy_(final.detach())
        return y.squeeze(1)
    if not traced:
        return known.backend.convolve_token(known.problem, x, known)
    p = _describe(given, x)
    if not operators.takes(p, x, backend):
        return in_torch.convolve_token(p, x)
    return operators.convolve_token(x.x, x.initial_state, x.weight, x.bias, p.op, activation, wished(backend))


def convolve_column(x: Convolved, activation: str | None) -> Tensor:
    """Runs `convolve_token` for x and y [N, D, 1]. A known call makes no views, which take as long as its launch."""
    given = (None, _describe_column, "causal_conv1d_update", activation)
    known = recall(given, x)
    if known is None or known.needs_grad:
        if is_traced(x.x) or needs_gradient(x):
            return convolve_token(x._replace(x=x.x[..., 0]), activation, None)[..., None]
        known = _look_at(given, x)
    return known.backend.convolve_token(known.problem, x, known)


def normalize(x: Normalized, op: str, activation: str | None, eps: float, backend: str | None) -> Tensor:
    """The norm, in x's shape and dtype."""
    given = (backend, _describe_norm, op, activation, eps)
    known = recall(given, x)
    if known is None:
        if is_traced(x.x):
            p = _describe(given, x)
            if not operators.takes(p, x, backend):
                return in_torch.normalize(p, x)
            return operators.normalize(*x, *take(p, operators.NormFields), wished(backend))[0]
        known = _look_at(given, x)
    if _differentiates(known):
        return Normalize.apply(known, *x)
    return known.backend.normalize(known.problem, x, known)


def normalize_backward(x: Normalized, op: str, activation: str | None, eps: float, dy: Tensor) -> Normalized:
    """The gradients of `normalize`, without autograd."""
    known = _look_at((None, _describe_norm, op, activation, eps), x)
    return known.backend.normalize_backward(known.problem, x, dy, known)


def gate(x: Gated, op: str, form: Form, output_dtype: torch.dtype, backend: str | None) -> Tensor:
    """Log decays in g's shape."""
    given = (backend, _describe_gate, op, form, output_dtype)
    known = recall(given, x)
    if known is None:
        if is_traced(x.g):
            p = _describe(given, x)
            if not operators.takes(p, x, backend):
                return in_torch.gate(p, x)
            return operators.gate(*x, *take(p, operators.DecayFields), wished(backend))[0]
        known = _look_at(given, x)
    if _differentiates(known):
        return Gate.apply(known, *x)
    return known.backend.gate(known.problem, x, known)


def chosen(kind: str, x: ElementwiseInputs, *options: Any) -> str:
    """The backend that would run a "convolution", a "token" of one, a "norm" or a "gate"; ValueError if none would.
    ``options``: the op's name and the arguments after it in `describe_convolution` and the other `describe_*`."""
    whole = {"convolution": _describe_convolution, "norm": _describe_norm, "gate": _describe_gate}
    return choose_backend((whole | {"token": _describe_token})[kind](x, *options), None, load_elementwise, quiet=True)


def _look_at(given: tuple[Any, ...], x: ElementwiseInputs) -> KnownCall:
    """The known call. ``given``: the backend that is asked for, a function that describes the call, its arguments."""
    return _look(given, None, x) if has_tangents() else look_at(_look, torch.is_grad_enabled(), given, None, x)


def _look(given: tuple[Any, ...], _: None, x: ElementwiseInputs) -> KnownCall:
    p = _describe(given, x)
    module = load_elementwise(choose_backend(p, given[0], load_elementwise))
    if module is not in_torch:
        refuse_transforms(p.op, x._fields, x)
    return KnownCall(p, module, needs_gradient(x))


def _describe(given: tuple[Any, ...], x: ElementwiseInputs) -> ElementwiseProblem:
    _, describe, *options = given
    return describe(x, *options)


def _differentiates(known: KnownCall) -> bool:
    """Whether the call goes through an autograd Function, because kernels have no other derivative."""
    return known.needs_grad and known.backend is not in_torch


def _describe_convolution(x: Convolved, op: str, activation: str | None, final: bool) -> ConvolutionProblem:
    return describe_convolution(x, op, activation, check_convolution(op, x, activation, final))


def _describe_token(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    check_token(op, x, activation)
    return describe_token(x, op, activation)


def _describe_column(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    return _describe_token(x._replace(x=x.x[..., 0]), op, activation)


def _describe_norm(x: Normalized, op: str, activation: str | None, eps: float) -> NormProblem:
    return describe_norm(x, op, activation, check_norm(op, x, eps))


def _describe_gate(x: Gated, op: str, form: Form, output_dtype: torch.dtype) -> GateProblem:
    return describe_gate(x, op, check_gate(op, x, form, output_dtype), output_dtype)


class Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: KnownCall, *tensors: Tensor | None):
        ctx.op, ctx.problem, ctx.known = known.problem.op, known.problem, known
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return known.backend.convolve(known.problem, Convolved(*tensors), known)

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor | None, dfinal: Tensor | None):
        backward = ctx.known.backend.convolve_backward
        return None, *backward(ctx.problem, Convolved(*tensors), dy, dfinal, ctx.known)


class Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: KnownCall, *tensors: Tensor | None):
        ctx.op, ctx.problem, ctx.known = known.problem.op, known.problem, known
        ctx.save_for_backward(*tensors)
        return known.backend.normalize(known.problem, Normalized(*tensors), known)

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor):
        return None, *ctx.known.backend.normalize_backward(ctx.problem, Normalized(*tensors), dy, ctx.known)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: KnownCall, *tensors: Tensor | None):
        ctx.op, ctx.problem, ctx.known = known.problem.op, known.problem, known
        ctx.save_for_backward(*tensors)
        return known.backend.gate(known.problem, Gated(*tensors), known)

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], dy: Tensor):
        return None, *ctx.known.backend.gate_backward(ctx.problem, Gated(*tensors), dy, ctx.known)
