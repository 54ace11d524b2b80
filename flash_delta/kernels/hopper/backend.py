"""The ``hopper`` backend: the delta rule with one decay per value head, forward, for sm_90a.

`rates` sums up the gates; one kernel does the rest (`loop`), inverse and all. Long sequences on few heads are walked in
segments, side by side (split.py): `factor`, `find_maps`, `compose`, `walk`. Whatever it cannot run, ``triton`` does.
"""

import torch
from torch import Tensor

from flash_delta.kernels.hopper import launch, launch_segments
from flash_delta.kernels.hopper.split import split_length
from flash_delta.kernels.triton.launcher import Call, make_call, on, run
from flash_delta.kernels.triton.tiles import chip_of
from flash_delta.problem import Inputs, Outputs, Problem

FORWARD = ("hopper",)  # the kind of its calls


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
    if problem.scale <= 0:
        return f"scale has to be positive, it is {problem.scale}"
    if problem.N * problem.T == 0:
        return "there are no tokens"
    return None


def forward(p: Problem, x: Inputs) -> Outputs:
    x = x._replace(q=_described(x.q), k=_described(x.k), v=_described(x.v))
    if x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.float().contiguous())
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(p.state_shape, dtype=torch.float32, device=p.device)
    rates = launch.new_rates(p)
    length = split_length(p, chip_of(p.device).processors)
    walk = None if length is None else launch_segments.new_walk(p, length)

    def kernels(c: Call) -> None:
        launch.run_rates(c, o, rates)
        if walk is None or c.compiling is not None:
            launch.run_loop(c, o, final, rates)
        if c.compiling is not None:
            launch_segments.compile_walk(c, o, final, rates)
        elif walk is not None:
            launch_segments.run_walk(c, o, final, rates, walk)

    with on(p.device):
        run(make_call(p, x, FORWARD, memo=p.memo), kernels, o, final, rates, *(walk or (None,) * 5)[1:])
    return Outputs(o, final)


def _described(t: Tensor) -> Tensor:
    """``t`` if the copy engine can describe its heads (launch.ragged), or a copy that it can."""
    row, token, head, channel = t.stride()
    fits = channel == 1 and token > 0 and token % 8 == 0 and head % 8 == 0 and row % token == 0
    return t if fits and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def remark(p: Problem) -> str | None:
    """What sizes decide."""
    length = split_length(p, chip_of(p.device).processors)
    if length is None:
        return None
    number = -(-p.T // length)
    return f"it walks sequences in segments of {length} tokens, up to {number} of them side by side"
