"""Short convolution, RMS norm and gate around the rule, on the first backend that can run them.

On the backend "torch" they are PyTorch's own operations, which autograd and compilers can follow. With kernels, each
goes through one autograd Function, or under torch.compile through its operator, like the rule. The table of operations
is in `_operators/elementwise.py`. Only inputs are saved for the backward pass. A second derivative of kernels is
refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_elementwise, wished
from flash_delta.ops._check.elementwise import describe_column, describe_token
from flash_delta.ops._known_calls import look_at, recall
from flash_delta.ops._operators import elementwise as operators
from flash_delta.ops._operators.elementwise import CONVOLUTION, KnownOperation, Operation, Results, call_operator
from flash_delta.ops._transforms import differentiable_once, has_tangents, is_traced, refuse_transforms
from flash_delta.problem import Convolved, ElementwiseInputs, ElementwiseProblem, needs_gradient
from flash_delta.reference import elementwise as in_torch


def compute(operation: Operation, x: ElementwiseInputs, fields: tuple[Any, ...], backend: str | None) -> Results:
    """The results of an operation: of a convolution y ``[B, T, D]`` and the final state ``[N, D, W]`` or None, of a
    norm y in x's shape and dtype, of a gate log decays in g's shape. ``fields``: the arguments of `Operation.check`
    after the inputs."""
    given = (backend, operation.check, *fields)
    known = recall(given, x)
    if known is None:
        if is_traced(x[0]):
            return call_operator(operation, operation.check(x, *fields), x, backend)
        known = _look_at(given, x)
    if operation.check_values is not None:
        operation.check_values(known.problem.op, x)
    if known.needs_grad and known.backend is not in_torch:
        return Elementwise.apply(known, *x)
    return known.run(known.problem, x, known)


def compute_backward(
    operation: Operation, x: ElementwiseInputs, fields: tuple[Any, ...], *d: Tensor | None
) -> ElementwiseInputs:
    """The gradients of `compute`, without autograd. ``d``: those of the results."""
    known = _look_at((None, operation.check, *fields), x)
    return known.run_backward(known.problem, x, *d, known)


class Elementwise(torch.autograd.Function):
    """An operation on kernels, which have no other derivative."""

    @staticmethod
    def forward(ctx, known: KnownOperation, *tensors: Tensor | None):
        ctx.op, ctx.known = known.problem.op, known
        ctx.save_for_backward(*tensors)
        if known.operation.results > 1:  # the gradient of one may be missing
            ctx.set_materialize_grads(False)
        return known.run(known.problem, known.operation.inputs(*tensors), known)

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], *d: Tensor | None):
        known = ctx.known
        return None, *known.run_backward(known.problem, known.operation.inputs(*tensors), *d, known)


def convolve_token(x: Convolved, activation: str | None, backend: str | None) -> Tensor:
    """y for one token ``x [N, D]``. The state is updated in place and gets no gradient."""
    given = (backend, describe_token, "causal_conv1d_update", activation)
    known = recall(given, x) or (None if is_traced(x.x) else _look_at(given, x))
    if needs_gradient(x) if known is None else known.needs_grad:
        state = x.initial_state.detach()
        row = x._replace(x=x.x.unsqueeze(1), initial_state=state.clone())
        y, final = compute(CONVOLUTION, row, ("causal_conv1d", activation, True), backend)
        state.copy_(final.detach())
        return y.squeeze(1)
    if known is not None:
        return known.backend.convolve_token(known.problem, x, known)
    p = describe_token(x, *given[2:])
    if not operators.takes(CONVOLUTION, p, x, backend):
        return in_torch.convolve_token(p, x)
    return operators.convolve_token(x.x, x.initial_state, x.weight, x.bias, p.op, activation, wished(backend))


def convolve_column(x: Convolved, activation: str | None) -> Tensor:
    """Runs `convolve_token` for x and y [N, D, 1]. A known call makes no views, which take as long as its launch."""
    given = (None, describe_column, "causal_conv1d_update", activation)
    known = recall(given, x)
    if known is None or known.needs_grad:
        if is_traced(x.x) or needs_gradient(x):
            return convolve_token(x._replace(x=x.x[..., 0]), activation, None)[..., None]
        known = _look_at(given, x)
    return known.backend.convolve_token(known.problem, x, known)


def chosen(check: Callable[..., ElementwiseProblem], x: ElementwiseInputs, *fields: Any) -> str:
    """The backend that would run a call; ValueError if none would. ``check``: as `Operation.check`."""
    return choose_backend(check(x, *fields), None, load_elementwise, quiet=True)


def _look_at(given: tuple[Any, ...], x: ElementwiseInputs) -> KnownOperation:
    """The known call. ``given``: the backend that is asked for, a function that checks the call, its arguments."""
    return _look(given, None, x) if has_tangents() else look_at(_look, torch.is_grad_enabled(), given, None, x)


def _look(given: tuple[Any, ...], _: None, x: ElementwiseInputs) -> KnownOperation:
    backend, check, *fields = given
    p = check(x, *fields)
    module = load_elementwise(choose_backend(p, backend, load_elementwise))
    if module is not in_torch:
        refuse_transforms(p.op, x._fields, x)
    return KnownOperation(p, module, needs_gradient(x))
