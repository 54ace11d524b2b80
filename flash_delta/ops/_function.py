"""The one autograd Function: every op of the family goes through it, or while compiling through its operator."""

import torch
from torch import Tensor

from flash_delta.ops._backend import Explain, Explanation, choose_backend, wished
from flash_delta.ops._execute import backward, forward
from flash_delta.ops._library import call_operator
from flash_delta.ops._options import as_bool
from flash_delta.ops._transforms import differentiable_once, is_traced
from flash_delta.problem import Inputs, Problem


def run(
    problem: Problem, inputs: Inputs, *, output_final_state: bool, backend: str | Explain | None
) -> tuple[Tensor, ...] | Explanation:
    """``(o, final_state)``, and the chunk states behind them if the problem keeps them."""
    if isinstance(backend, Explain):
        return backend.of(problem)
    if is_traced(inputs.q):  # one opaque operator, whose dispatch other calls need not pay
        o, final_state, states = call_operator(problem, inputs, wished(backend))
    elif problem.needs_grad:
        o, final_state, states = DeltaRule.apply(problem, choose_backend(problem, backend), *inputs)
    else:  # autograd's bookkeeping would be a good part of a decoding step
        o, final_state, _, states = forward(problem, choose_backend(problem, backend), inputs)
    result = (o, final_state if as_bool(problem.op, "output_final_state", output_final_state) else None)
    return (*result, states) if problem.keep_states else result


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Problem, backend: str, *tensors: Tensor | None):
        out = forward(problem, backend, Inputs(*tensors))
        ctx.problem, ctx.backend = problem, backend
        ctx.save_for_backward(*tensors, *out.saved)
        ctx.set_materialize_grads(False)
        if out.states is not None:
            ctx.mark_non_differentiable(out.states)
        return out.o, out.final_state, out.states

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors: tuple[Tensor | None, ...], do: Tensor | None, dfinal: Tensor | None, _):
        count = len(Inputs._fields)
        inputs, saved = Inputs(*tensors[:count]), tensors[count:]
        return None, None, *backward(ctx.problem, ctx.backend, inputs, saved, do, dfinal)
