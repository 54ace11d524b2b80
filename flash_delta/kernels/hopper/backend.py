"""The ``hopper`` backend: the delta rule with one decay per value head, forward, for sm_90a.

`rates` sums up the gates; one kernel does the rest (`loop`), inverse and all. Whatever it cannot run, ``triton`` does.
"""

import torch
from torch import Tensor

from flash_delta.kernels.hopper import launch
from flash_delta.kernels.hopper.tiles import choose
from flash_delta.kernels.triton.tiles import chip_of
from flash_delta.problem import Inputs, Outputs, Problem


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" or chip_of(problem.device).target != "sm_90":
        return f"it needs a Hopper GPU (sm_90), the tensors are on {problem.device}"
    if problem.needs_grad:
        return "it has no backward pass"
    if problem.recurrent or problem.pool is not None:
        return "it runs whole sequences, chunk by chunk, whose states are tensors of their own"
    if problem.gate == "channel" or problem.erase != "decayed":
        return "it runs the delta rule with one decay per value head or none, whose keys erase what they write"
    if problem.keep_states:
        return "it does not return the states of chunks"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its products are of 16 bits, the tensors are {problem.dtype}"
    if (problem.K, problem.V) != (128, 128):
        return f"K and V have to be 128, they are {problem.K} and {problem.V}"
    if problem.N * problem.T == 0:
        return "there are no tokens"
    return None


def remark(problem: Problem) -> str | None:
    """What else is to be said of how it runs ``problem``: nothing."""
    return None


def forward(p: Problem, x: Inputs) -> Outputs:
    x = x._replace(q=_described(x.q), k=_described(x.k), v=_described(x.v))
    if x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.float().contiguous())
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(p.state_shape, dtype=torch.float32, device=p.device)
    rates, chip = launch.new_rates(p), chip_of(p.device)
    with torch.cuda.device(p.device):
        launch.run_rates(p, x, o, rates)
        launch.run_loop(p, x, o, final, rates, choose(p, chip), chip.processors)
    return Outputs(o, final)


def _described(t: Tensor) -> Tensor:
    """``t`` if the copy engine can describe its heads (launch.ragged), or a copy that it can."""
    row, token, head, channel = t.stride()
    fits = channel == 1 and token > 0 and token % 8 == 0 and head % 8 == 0 and row % token == 0
    return t if fits and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)
