"""The one autograd Function: every op of the family goes through it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend
from flash_delta.problem import Inputs, Outputs, Problem


def run(
    problem: Problem, inputs: Inputs, *, output_final_state: bool, backend: str | Explain | None
) -> tuple[Tensor, ...] | Explanation:
    """``(o, final_state)``, and the chunk states behind them if the problem keeps them."""
    if isinstance(backend, Explain):
        return backend.of(problem)
    name = choose_backend(problem, backend)
    if problem.needs_grad:
        o, final_state, states = DeltaRule.apply(problem, name, *inputs)
    else:  # autograd's bookkeeping would be a good part of a decoding step
        o, final_state, _, states = _forward(problem, name, inputs)
    result = (o, final_state if output_final_state else None)
    return (*result, states) if problem.keep_states else result


def _forward(problem: Problem, backend: str, inputs: Inputs) -> Outputs:
    module = load_backend(backend)
    with _own_precision(problem):
        return (module.step if problem.recurrent else module.forward)(problem, inputs)


def _own_precision(problem: Problem) -> AbstractContextManager:
    """Backends choose their own precision; autocast must not round their products."""
    device = problem.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Problem, backend: str, *tensors: Tensor | None):
        out = _forward(problem, backend, Inputs(*tensors))
        ctx.problem, ctx.backend = problem, backend
        ctx.save_for_backward(*tensors, *out.saved)
        ctx.set_materialize_grads(False)
        if out.states is not None:
            ctx.mark_non_differentiable(out.states)
        return out.o, out.final_state, out.states

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None, _):
        tensors = ctx.saved_tensors  # read once: checkpointing lets each tensor be unpacked only once
        count = len(Inputs._fields)
        inputs, saved = Inputs(*tensors[:count]), tensors[count:]
        do = torch.zeros_like(inputs.v) if do is None else do
        with _own_precision(ctx.problem):
            gradients = load_backend(ctx.backend).backward(ctx.problem, inputs, saved, do, dfinal)
        return None, None, *gradients
