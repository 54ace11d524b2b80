"""The family as two operators of torch.library: what torch.compile and torch.export see of a call.

``flash_delta::delta_rule`` takes a call's tensors and the plain fields of its Problem; the rest of the Problem is sizes
of the tensors. A tracer never looks into a backend, and sizes may stay symbols. What forward saves for backward has to
be known to the tracer: a backend that saves anything has

    empty_saved(problem, inputs) -> tuple[Tensor, ...]

fresh tensors with the shapes, strides and dtypes of its ``Outputs.saved``, made by arithmetic on sizes (never on
``problem.lengths``, whose values no tracer knows). Without it nothing is saved, and backward computes it again.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_delta.ops._backend import choose_backend, load_backend
from flash_delta.ops._check.rule import read_lengths
from flash_delta.ops._execute import backward, forward
from flash_delta.ops._known_calls import look_at
from flash_delta.problem import Inputs, KnownCall, Problem

COUNT = len(Inputs._fields)
FIELDS = {  # of Problem, which the tensors do not tell
    "op": "str",
    "gate": "str",
    "erase": "str?",
    "scale": "float",
    "chunk_size": "int",
    "recurrent": "bool",
    "l2norm": "bool",
    "raw_gate": "bool",
    "lower_bound": "float?",
    "raw_beta": "bool",
    "beta_range": "float",
    "state_v_first": "bool",
    "keep_states": "bool",
    "disable_recompute": "bool",
    "needs_grad": "bool",
}
TENSORS = ", ".join(
    ["Tensor q, Tensor k, Tensor v", *(f"Tensor? {n}" for n in (*Inputs._fields[3:], "cu_seqlens_cpu"))]
)
OPTIONS = ", ".join([*(f"{kind} {name}" for name, kind in FIELDS.items()), "str? backend"])


def call_operator(problem: Problem, x: Inputs, wish: str | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(o, final_state, states)`` of a traced call, whose ``problem.lengths`` are cu_seqlens_cpu (`describe`)."""
    o, final_state, *rest = delta_rule(*x, problem.lengths, *(getattr(problem, name) for name in FIELDS), wish)
    return o, final_state, rest[0] if problem.keep_states else None


@torch.library.custom_op("flash_delta::delta_rule", mutates_args=(), schema=f"({TENSORS}, {OPTIONS}) -> Tensor[]")
def delta_rule(*args: Any) -> list[Tensor]:
    """``[o, final_state, *saved]``, with ``keep_states`` the chunk states before what is saved."""
    x, cu_seqlens_cpu, options = _split(args)
    problem, known = _look_at(x, cu_seqlens_cpu, options)
    out = forward(problem._replace(needs_grad=_saves(problem, known.backend)), known, x)
    results = (out.o, out.final_state, out.states)
    return [t.contiguous() for t in results if t is not None] + list(out.saved)


@delta_rule.register_fake
def _(*args: Any) -> list[Tensor]:
    x, cu_seqlens_cpu, options = _split(args)
    problem, backend = _describe(x, _some_lengths(x, cu_seqlens_cpu), options)
    results = [x.v.new_empty(x.v.shape), x.v.new_empty(problem.state_shape, dtype=problem.accumulate)]
    if problem.keep_states:
        chunks = (problem.T + problem.chunk_size - 1) // problem.chunk_size
        if problem.packed:  # only the bounds' values would tell
            chunks = torch.library.get_ctx().new_dynamic_size()
        results.append(x.v.new_empty(problem.B, chunks, problem.HV, problem.K, problem.V))
    return results + (list(backend.empty_saved(problem, x)) if _saves(problem, backend) else [])


@torch.library.custom_op(
    "flash_delta::delta_rule_backward",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor[] saved, Tensor? do, Tensor? dfinal, {OPTIONS}) -> Tensor[]",
)
def delta_rule_backward(*args: Any) -> list[Tensor]:
    """The gradients of the inputs that are there. It has no derivative of its own, and autograd says so."""
    x, cu_seqlens_cpu, (saved, do, dfinal, *options) = _split(args)
    problem, known = _look_at(x, cu_seqlens_cpu, options)
    gradients = backward(problem, known, x, tuple(saved), do, dfinal)
    return [d.contiguous() for t, d in zip(x[:-1], gradients[:-1], strict=True) if t is not None]


@delta_rule_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in args[: COUNT - 1] if t is not None]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    *tensors, options = *inputs[: COUNT + 1], inputs[COUNT + 1 :]
    keep_states = dict(zip(FIELDS, options, strict=False))["keep_states"]
    ctx.options = options
    ctx.save_for_backward(*tensors, *output[2 + keep_states :])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing lets each tensor be unpacked only once
    tensors, saved = saved[: COUNT + 1], saved[COUNT + 1 :]
    present = iter(delta_rule_backward(*tensors, list(saved), *gradients[:2], *ctx.options))
    inputs = (None if t is None else next(present) for t in tensors[: COUNT - 1])
    return (*inputs, None, None, *(None for _ in ctx.options))


delta_rule.register_autograd(_differentiate, setup_context=_setup_context)


def _split(args: tuple) -> tuple[Inputs, Tensor | None, tuple]:
    """An operator's arguments: inputs, cu_seqlens_cpu and what follows them."""
    return Inputs(*args[:COUNT]), args[COUNT], args[COUNT + 1 :]


def _look_at(x: Inputs, cu_seqlens_cpu: Tensor | None, options: tuple) -> tuple[Problem, KnownCall]:
    """One known call for forward and backward; lengths are values, which nobody remembers."""
    lengths = read_lengths(options[0], x, cu_seqlens_cpu)
    known = look_at(partial(_look, lengths), False, (delta_rule, lengths is None, *options), None, x)
    return known.problem._replace(lengths=lengths), known


def _look(lengths: tuple[int, ...] | None, given: tuple, _: None, x: Inputs) -> KnownCall:
    problem, backend = _describe(x, lengths, given[2:])
    return KnownCall(problem, backend, problem.needs_grad)


def _describe(x: Inputs, lengths: tuple[int, ...] | None, options: tuple) -> tuple[Problem, ModuleType]:
    """The Problem that was taken apart for the operator, and its backend."""
    (B, T, H, K), (HV, V), packed = x.q.shape, x.v.shape[2:], x.cu_seqlens is not None
    *values, wish = options
    problem = Problem(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=x.cu_seqlens.shape[0] - 1 if packed else B, dtype=x.q.dtype,
        device=x.q.device, erase_keys=x.p is not None, lengths=lengths, packed=packed,
        **dict(zip(FIELDS, values, strict=True)),
    )  # fmt: skip
    return problem, load_backend(choose_backend(problem, wish))


def _some_lengths(x: Inputs, cu_seqlens_cpu: Tensor | None) -> tuple[int, ...] | None:
    """For a tracer: whether the host will know the lengths; their values it cannot have."""
    known = x.cu_seqlens is None or x.cu_seqlens.device.type == "cpu" or cu_seqlens_cpu is not None
    return () if known else None


def _saves(problem: Problem, backend: ModuleType) -> bool:
    """``step`` saves nothing, and what a tracer cannot foresee is not saved either."""
    return problem.needs_grad and not problem.recurrent and hasattr(backend, "empty_saved")
