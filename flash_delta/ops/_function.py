"""The one autograd Function: every op of the family goes through it."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.ops._backend import Explain, Explanation, choose_backend, load_backend
from flash_delta.problem import Inputs, Problem


def run(
    problem: Problem, inputs: Inputs, *, output_final_state: bool, backend: str | Explain | None
) -> tuple[Tensor, ...] | Explanation:
    """``(o, final_state)``, and the chunk states behind them if the problem keeps them."""
    if isinstance(backend, Explain):
        return backend.of(problem)
    name = choose_backend(problem, backend)
    o, final_state, states = DeltaRule.apply(problem, name, *inputs)
    result = (o, final_state if output_final_state else None)
    return (*result, states) if problem.keep_states else result


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Problem, backend: str, *tensors: Tensor | None):
        module, inputs = load_backend(backend), Inputs(*tensors)
        with torch.autocast(problem.device.type, enabled=False):  # backends choose their own precision
            out = (module.step if problem.recurrent else module.forward)(problem, inputs)
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
        with torch.autocast(ctx.problem.device.type, enabled=False):
            gradients = load_backend(ctx.backend).backward(ctx.problem, inputs, saved, do, dfinal)
        return None, None, *gradients
