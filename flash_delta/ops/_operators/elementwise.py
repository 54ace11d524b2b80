"""The table of elementwise operations, and their operators, which torch.compile and torch.export see.

An operator takes a call's tensors, and those fields of its problem that do not follow from tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flash_delta.backend import TORCH, is_seen_through
from flash_delta.ops._backend import choose_backend, load_elementwise, refuse_disabled, wished
from flash_delta.ops._check.elementwise import (
    check_bounds,
    describe_convolution,
    describe_gate,
    describe_norm,
    describe_token,
)
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import BackwardArguments, GateFields, define, named, take
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

Results = Tensor | tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An elementwise operation: how its calls are checked, and what runs them."""

    name: str  # of its operator
    inputs: type  # the named tuple of its tensors
    fields: type  # the named tuple of those fields of its problem that do not follow from tensors
    check: Callable[..., ElementwiseProblem]  # takes inputs and fields, returns the problem
    run: str  # a function of the backend: takes problem, inputs and a known call, returns the results
    backward: str  # another one: takes the gradients of the results before the known call, returns those of inputs
    fits: Callable[[Any], bool]  # whether kernels take the sizes of a problem
    empty: Callable[[Any, Any], list[Tensor]]  # takes problem and inputs, returns tensors like the results
    results: int = 1  # how many there can be
    check_values: Callable[[str, Any], None] | None = None  # checks what a known call does not remember


def _fields(problem: type, **kinds: Any) -> type:
    return named("Fields", marked(problem, Schema), **kinds)


def _empty_convolved(p: ConvolutionProblem, x: Convolved) -> list[Tensor]:
    y = x.x.new_empty(x.x.shape)
    return [y, x.x.new_empty(p.N, p.D, p.W)] if p.output_final_state else [y]


CONVOLUTION = Operation(
    "causal_conv1d", Convolved, _fields(ConvolutionProblem), describe_convolution, "convolve", "convolve_backward",
    lambda p: p.W <= MOST_TAPS, _empty_convolved, 2, check_bounds,
)  # fmt: skip
NORM = Operation(
    "rms_norm", Normalized, _fields(NormProblem), describe_norm, "normalize", "normalize_backward",
    lambda p: p.D <= WIDEST_ROW, lambda p, x: [x.x.new_empty(x.x.shape, dtype=p.output_dtype)],
)  # fmt: skip
GATE = Operation(
    "log_decay", Gated, _fields(GateProblem, gate=GateFields), describe_gate, "gate", "gate_backward",
    lambda p: p.HV * p.K <= MOST_GATES, lambda p, x: [x.g.new_empty(x.g.shape, dtype=p.output_dtype)],
)  # fmt: skip
OPERATIONS = {ConvolutionProblem: CONVOLUTION, NormProblem: NORM, GateProblem: GATE}


@dataclass(slots=True, eq=False)
class KnownOperation(KnownCall):
    """A known call, and the functions of its backend. Looking them up takes time, so this is done once."""

    operation: Operation = field(init=False)
    run: Callable[..., Results] = field(init=False)
    run_backward: Callable[..., ElementwiseInputs] | None = field(init=False)

    def __post_init__(self) -> None:
        self.operation = OPERATIONS[type(self.problem)]
        self.run = getattr(self.backend, self.operation.run)
        self.run_backward = getattr(self.backend, self.operation.backward, None)  # in PyTorch a gate has none


def call_operator(operation: Operation, p: ElementwiseProblem, x: ElementwiseInputs, backend: str | None) -> Results:
    """The results of a traced call. PyTorch's own operations do not become an operator: the compiler sees them."""
    if not takes(operation, p, x, backend):
        return getattr(in_torch, operation.run)(p, x)
    found = _operators[operation.name](*x, *take(p, operation.fields), wished(backend))
    return found[0] if operation.results == 1 else (*found, None)[:2]


def takes(operation: Operation, p: ElementwiseProblem, x: ElementwiseInputs, backend: str | None) -> bool:
    """Whether kernels run a traced call. Sizes decide here in the same way as in the backend, because a tracer cannot
    ask the backend."""
    wish = wished(backend)
    on_gpu = p.device.type == "cuda" and p.dtype != torch.float64 and operation.fits(p)
    if on_gpu if wish is None else not is_seen_through(wish):
        refuse_transforms(p.op, x._fields, x)
        return True
    refuse_disabled(p.op, wish or TORCH)
    return False


def _look_at(check: Callable[..., Any], x: ElementwiseInputs, fields: tuple, wish: str | None) -> KnownOperation:
    """One known call for forward and backward."""
    return look_at(_look, False, (wish, check, fields), None, x)


def _look(given: tuple[Any, ...], _: None, x: ElementwiseInputs) -> KnownOperation:
    wish, check, fields = given
    p = check(x, *fields)
    module = load_elementwise(choose_backend(p, wish, load_elementwise, without=in_torch))
    return KnownOperation(p, module, needs_grad=False)


def _define(operation: Operation) -> OpOverload:
    def run(x: operation.inputs, fields: operation.fields, backend: str | None) -> list[Tensor]:
        known = _look_at(operation.check, x, fields, backend)
        found = known.run(known.problem, x, known)
        return [found] if operation.results == 1 else [t for t in found if t is not None]

    def fake(x: ElementwiseInputs, fields: tuple, _: str | None) -> list[Tensor]:
        return operation.empty(operation.check(x, *fields), x)

    def backward(
        x: ElementwiseInputs, behind: BackwardArguments, fields: tuple, backend: str | None
    ) -> ElementwiseInputs:
        known, gradients = _look_at(operation.check, x, fields, backend), (behind.do, behind.dfinal)
        return known.run_backward(known.problem, x, *gradients[: operation.results], known)

    return define(operation.name, run, fake, backward=backward)


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


_operators = {operation.name: _define(operation) for operation in OPERATIONS.values()}
convolve_token = define("causal_conv1d_update", _convolve_token, lambda x, *_: x.new_empty(x.shape), writes=["state"])
