"""Kernels of `_modules.py` as operators of torch.library: what torch.compile and torch.export see of them.

An operator takes a call's tensors and the plain fields of its problem; the rest are sizes of the tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_modules
from flash_delta.ops._known_calls import look_at
from flash_delta.problem import ConvolutionProblem, Convolved, KnownCall, Normalized, NormProblem
from flash_delta.reference import modules as in_torch

CONVOLUTION = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens"
CONVOLUTION_OPTIONS = "str op, str? activation, bool output_final_state, str? backend"
NORM, NORM_OPTIONS = "Tensor x, Tensor weight, Tensor? gate", "str op, str? activation, float eps, str? backend"


def options(p: ConvolutionProblem | NormProblem) -> tuple[Any, ...]:
    """What tensors do not tell, in the order of the schemas."""
    return p.op, p.activation, p.output_final_state if isinstance(p, ConvolutionProblem) else p.eps


def describe_convolution(x: Convolved, op: str, activation: str | None, final: bool) -> ConvolutionProblem:
    (B, T, D), W = x.x.shape, x.weight.shape[1]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return ConvolutionProblem(
        op, B, T, D, W, N, _widest(x[:4]), x.x.device, x.cu_seqlens is not None, activation, final
    )


def _describe_token(x: Convolved, op: str, activation: str | None) -> ConvolutionProblem:
    return describe_convolution(x._replace(x=x.x.unsqueeze(1)), op, activation, False)


def describe_norm(x: Normalized, op: str, activation: str | None, eps: float) -> NormProblem:
    return NormProblem(op, x.x.shape[-1], _widest(x), x.x.device, eps, activation)


def _widest(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """float64 if one of them is, else the first one's."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return torch.float64 if torch.float64 in dtypes else dtypes[0]


def _look_at(describe: Callable[..., Any], x: Convolved | Normalized, fields: tuple, wish: str | None) -> KnownCall:
    """One known call for forward and backward."""
    return look_at(_look, False, (wish, describe, *fields), None, x)


def _look(given: tuple[Any, ...], _: None, x: Convolved | Normalized) -> KnownCall:
    wish, describe, *fields = given
    p = describe(x, *fields)
    return KnownCall(p, load_modules(choose_backend(p, wish, load_modules, without=in_torch)), needs_grad=False)


def _convolve(*args: Any) -> list[Tensor]:
    x, (*fields, wish) = Convolved(*args[:5]), args[5:]
    known = _look_at(describe_convolution, x, fields, wish)
    return [t for t in known.backend.convolve(known.problem, x, known) if t is not None]


def _convolve_backward(*args: Any) -> list[Tensor]:
    x, (dy, dfinal, *fields, wish) = Convolved(*args[:5]), args[5:]
    known = _look_at(describe_convolution, x, fields, wish)
    return [d for d in known.backend.convolve_backward(known.problem, x, dy, dfinal, known) if d is not None]


def _normalize(*args: Any) -> list[Tensor]:
    x, (*fields, wish) = Normalized(*args[:3]), args[3:]
    known = _look_at(describe_norm, x, fields, wish)
    return [known.backend.normalize(known.problem, x, known)]


def _normalize_backward(*args: Any) -> list[Tensor]:
    x, (dy, *fields, wish) = Normalized(*args[:3]), args[3:]
    known = _look_at(describe_norm, x, fields, wish)
    return [d for d in known.backend.normalize_backward(known.problem, x, dy, known) if d is not None]


def _fake_convolve(*args: Any) -> list[Tensor]:
    p = describe_convolution(Convolved(*args[:5]), *args[5:8])
    y = args[0].new_empty(args[0].shape)
    return [y, args[0].new_empty(p.N, p.D, p.W)] if p.output_final_state else [y]


def _fake_normalize(*args: Any) -> list[Tensor]:
    return [args[0].new_empty(args[0].shape)]


def _define(
    name: str, run: Callable, fake: Callable, back: Callable, tensors: str, floats: int, gradients: str, fields: str
) -> Callable[..., list[Tensor]]:
    """The operator ``name`` with its autograd; of its ``tensors`` the first ``floats`` have gradients."""
    count = tensors.count("Tensor")
    operator = torch.library.custom_op(
        f"flash_delta::{name}", run, mutates_args=(), schema=f"({tensors}, {fields}) -> Tensor[]"
    )
    backward = torch.library.custom_op(
        f"flash_delta::{name}_backward", back, mutates_args=(),
        schema=f"({tensors}, {gradients}, {fields}) -> Tensor[]",
    )  # fmt: skip
    operator.register_fake(fake)
    backward.register_fake(lambda *args: [t.new_empty(t.shape) for t in args[:floats] if t is not None])

    def setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        ctx.fields = inputs[count:]
        ctx.save_for_backward(*inputs[:count])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, outputs: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors  # read once: checkpointing lets each tensor be unpacked only once
        given = [*outputs, None][: gradients.count("Tensor")]
        found = iter(backward(*x, *given, *ctx.fields))
        inputs = [None if t is None else next(found) for t in x[:floats]]
        return (*inputs, *[None] * (count - floats), *(None for _ in ctx.fields))

    operator.register_autograd(differentiate, setup_context=setup)
    return operator


convolve = _define(
    "causal_conv1d", _convolve, _fake_convolve, _convolve_backward, CONVOLUTION, 4, "Tensor? dy, Tensor? dfinal",
    CONVOLUTION_OPTIONS,
)  # fmt: skip
normalize = _define(
    "rms_norm", _normalize, _fake_normalize, _normalize_backward, NORM, 3, "Tensor dy", NORM_OPTIONS
)  # fmt: skip


@torch.library.custom_op(
    "flash_delta::causal_conv1d_update",
    mutates_args=("state",),
    schema="(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, str op, str? activation, str? backend) -> Tensor",
)
def convolve_token(*args: Any) -> Tensor:
    token, state, weight, bias, op, activation, wish = args
    x = Convolved(token, weight, bias, state)
    known = _look_at(_describe_token, x, (op, activation), wish)
    return known.backend.convolve_token(known.problem, x, known)


@convolve_token.register_fake
def _(*args: Any) -> Tensor:
    return args[0].new_empty(args[0].shape)
