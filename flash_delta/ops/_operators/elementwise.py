"""Operators for the kernels of `_elementwise.py`, which torch.compile and torch.export see.

An operator takes a call's tensors, and those fields of its problem that do not follow from tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_delta.backend import TORCH, is_seen_through
from flash_delta.ops._backend import choose_backend, load_elementwise, refuse_disabled, wished
from flash_delta.ops._check.elementwise import describe_convolution, describe_gate, describe_norm, describe_token
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import BackwardArguments, GateFields, define, named
from flash_delta.ops._transforms import refuse_transforms
from flash_delta.problem import (
    MOST_GATES,
    MOST_TAPS,
    WIDEST_ROW,
    ConvolutionProblem,
    Convolved,
    ElementwiseInputs,
    ElementwiseProblem,
    Gated,
    GateProblem,
    KnownCall,
    Normalized,
    NormProblem,
    Schema,
    marked,
)
from flash_delta.reference import elementwise as in_torch

ConvolutionFields = named("ConvolutionFields", marked(ConvolutionProblem, Schema))
NormFields = named("NormFields", marked(NormProblem, Schema))
DecayFields = named("DecayFields", marked(GateProblem, Schema), gate=GateFields)


def takes(p: ElementwiseProblem, x: ElementwiseInputs, backend: str | None) -> bool:
    """Whether the call becomes an operator under torch.compile. PyTorch's own operations do not, so that the compiler
    sees them. Sizes decide here in the same way as in the backend, because a tracer cannot ask the backend."""
    wish = wished(backend)
    on_gpu = p.device.type == "cuda" and p.dtype != torch.float64 and _fits(p)
    if on_gpu if wish is None else not is_seen_through(wish):
        refuse_transforms(p.op, x._fields, x)
        return True
    refuse_disabled(p.op, wish or TORCH)
    return False


def _fits(p: ElementwiseProblem) -> bool:
    if isinstance(p, NormProblem):
        return p.D <= WIDEST_ROW
    return p.W <= MOST_TAPS if isinstance(p, ConvolutionProblem) else p.HV * p.K <= MOST_GATES


def _look_at(describe: Callable[..., Any], x: ElementwiseInputs, fields: tuple, wish: str | None) -> KnownCall:
    """One known call for forward and backward."""
    return look_at(_look, False, (wish, describe, fields), None, x)


def _look(given: tuple[Any, ...], _: None, x: ElementwiseInputs) -> KnownCall:
    wish, describe, fields = given
    p = describe(x, *fields)
    return KnownCall(p, load_elementwise(choose_backend(p, wish, load_elementwise, without=in_torch)), needs_grad=False)


def _convolve(x: Convolved, fields: ConvolutionFields, backend: str | None) -> list[Tensor]:
    known = _look_at(describe_convolution, x, fields, backend)
    return [t for t in known.backend.convolve(known.problem, x, known) if t is not None]


def _fake_convolve(x: Convolved, fields: ConvolutionFields, backend: str | None) -> list[Tensor]:
    p, y = describe_convolution(x, *fields), x.x.new_empty(x.x.shape)
    return [y, x.x.new_empty(p.N, p.D, p.W)] if p.output_final_state else [y]


def _convolve_backward(
    x: Convolved, behind: BackwardArguments, fields: ConvolutionFields, backend: str | None
) -> Convolved:
    known = _look_at(describe_convolution, x, fields, backend)
    return known.backend.convolve_backward(known.problem, x, behind.do, behind.dfinal, known)


def _convolve_token(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    op: str,
    activation: str | None,
    backend: str | None,
) -> Tensor:
    token = Convolved(x, weight, bias, state)
    known = _look_at(describe_token, token, (op, activation), backend)
    return known.backend.convolve_token(known.problem, token, known)


def _normalize(x: Normalized, fields: NormFields, backend: str | None) -> list[Tensor]:
    known = _look_at(describe_norm, x, fields, backend)
    return [known.backend.normalize(known.problem, x, known)]


def _normalize_backward(
    x: Normalized, behind: BackwardArguments, fields: NormFields, backend: str | None
) -> Normalized:
    known = _look_at(describe_norm, x, fields, backend)
    return known.backend.normalize_backward(known.problem, x, behind.do, known)


def _gate(x: Gated, fields: DecayFields, backend: str | None) -> list[Tensor]:
    known = _look_at(describe_gate, x, fields, backend)
    return [known.backend.gate(known.problem, x, known)]


def _fake_gate(x: Gated, fields: DecayFields, backend: str | None) -> list[Tensor]:
    return [x.g.new_empty(x.g.shape, dtype=fields.output_dtype)]


def _gate_backward(x: Gated, behind: BackwardArguments, fields: DecayFields, backend: str | None) -> Gated:
    known = _look_at(describe_gate, x, fields, backend)
    return known.backend.gate_backward(known.problem, x, behind.do, known)


convolve = define("causal_conv1d", _convolve, _fake_convolve, backward=_convolve_backward)
convolve_token = define("causal_conv1d_update", _convolve_token, lambda x, *_: x.new_empty(x.shape), writes=["state"])
normalize = define("rms_norm", _normalize, lambda x, *_: [x.x.new_empty(x.x.shape)], backward=_normalize_backward)
gate = define("log_decay", _gate, _fake_gate, backward=_gate_backward)
