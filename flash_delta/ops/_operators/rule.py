"""The two operators of the family, which torch.compile and torch.export see.

``flash_delta::delta_rule`` takes a call's tensors, and those fields of its Problem that do not follow from tensors. A
tracer never looks into a backend, and sizes may stay symbols. The tracer has to know which tensors the forward pass
saves. So a backend that saves tensors has

    empty_saved(problem, inputs) -> tuple[Tensor, ...]

which returns new tensors with the shapes, strides and dtypes of its ``Outputs.saved``. It computes them from sizes and
never from ``problem.lengths``, whose values a tracer does not know. Without this function nothing is saved, and the
backward pass computes everything again.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_delta.backend import plans_on_host
from flash_delta.ops._backend import choose_backend, load_backend
from flash_delta.ops._check.rule import read_lengths
from flash_delta.ops._execute import backward, forward
from flash_delta.ops._known_calls import look_at
from flash_delta.ops._operators.define import BackwardArguments, GateFields, define, named, take
from flash_delta.problem import Inputs, KnownCall, Problem, Schema, gate_of, marked, strength_dtype

Fields = named("Fields", marked(Problem, Schema), gate=GateFields)


def call_operator(problem: Problem, x: Inputs, wish: str | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(o, final_state, states)`` of a traced call. Its ``problem.lengths`` is cu_seqlens_cpu (`describe`)."""
    o, final_state, *rest = delta_rule(*x, problem.lengths, *take(problem, Fields), wish)
    return o, final_state, rest[0] if problem.keep_states else None


def _run(x: Inputs, cu_seqlens_cpu: Tensor | None, fields: Fields, backend: str | None) -> list[Tensor]:
    """``[o, final_state, *saved]``. With ``keep_states`` the chunk states come before the saved tensors."""
    problem, known = _look_at(x, cu_seqlens_cpu, fields, backend)
    out = forward(problem._replace(needs_grad=_saves(problem, known.backend)), known, x)
    results = (out.o, out.final_state, out.states)
    return [t.contiguous() for t in results if t is not None] + list(out.saved)


def _fake(x: Inputs, cu_seqlens_cpu: Tensor | None, fields: Fields, backend: str | None) -> list[Tensor]:
    problem, module = _describe(x, _some_lengths(x, cu_seqlens_cpu), fields, backend)
    o = x.v.new_empty(*x.q.shape[:2], *x.v.shape[2:])
    results = [o, x.v.new_empty(problem.state_shape, dtype=problem.accumulate)]
    if problem.keep_states:
        chunks = (problem.T + problem.chunk_size - 1) // problem.chunk_size
        if problem.packed:  # the size depends on the bounds' values
            chunks = torch.library.get_ctx().new_dynamic_size()
        results.append(x.v.new_empty(problem.B, chunks, *problem.state_shape[1:]))
    return results + (list(module.empty_saved(problem, x)) if _saves(problem, module) else [])


def _run_backward(
    x: Inputs, cu_seqlens_cpu: Tensor | None, behind: BackwardArguments, fields: Fields, backend: str | None
) -> Inputs:
    problem, known = _look_at(x, cu_seqlens_cpu, fields, backend)
    return backward(problem, known, x, tuple(behind.saved), behind.do, behind.dfinal)


delta_rule = define(
    "delta_rule", _run, _fake, backward=_run_backward, saved_from=lambda x, bounds, fields, wish: 2 + fields.keep_states
)


def _look_at(x: Inputs, cu_seqlens_cpu: Tensor | None, fields: Fields, wish: str | None) -> tuple[Problem, KnownCall]:
    """The problem, and one known call for forward and backward. The known call does not remember lengths."""
    lengths = read_lengths(fields.op, x, cu_seqlens_cpu)
    known = look_at(partial(_look, lengths), False, (delta_rule, lengths is None, fields, wish), None, x)
    if lengths is None and plans_on_host(known.backend):
        lengths = read_lengths(fields.op, x, None, wait=True)
    return known.problem._replace(lengths=lengths), known


def _look(lengths: tuple[int, ...] | None, given: tuple[Any, ...], _: None, x: Inputs) -> KnownCall:
    problem, module = _describe(x, lengths, *given[2:])
    return KnownCall(problem, module, problem.needs_grad)


def _describe(
    x: Inputs, lengths: tuple[int, ...] | None, fields: Fields, wish: str | None
) -> tuple[Problem, ModuleType]:
    """The Problem, made again from the operator's arguments, and its backend."""
    (B, T, H, K), (HV, V), packed = x.k.shape, x.v.shape[2:], x.cu_seqlens is not None
    problem = Problem(
        B=B, T=T, H=H, HV=HV, K=K, V=V, N=x.cu_seqlens.shape[0] - 1 if packed else B, dtype=x.q.dtype,
        device=x.q.device, erase_keys=x.p is not None, strength_dtype=strength_dtype(x), lengths=lengths, packed=packed,
        **fields._asdict() | {"gate": gate_of(fields.gate, x.g, x.A_log, x.dt_bias)},
    )  # fmt: skip
    return problem, load_backend(choose_backend(problem, wish))


def _some_lengths(x: Inputs, cu_seqlens_cpu: Tensor | None) -> tuple[int, ...] | None:
    """Lengths for a tracer, which cannot have their values: () if the host will know them, else None."""
    known = x.cu_seqlens is None or x.cu_seqlens.device.type == "cpu" or cu_seqlens_cpu is not None
    return () if known else None


def _saves(problem: Problem, backend: ModuleType) -> bool:
    """Whether the call saves tensors. ``step`` saves none. A tracer learns their shapes from `empty_saved`."""
    return problem.needs_grad and not problem.recurrent and hasattr(backend, "empty_saved")
