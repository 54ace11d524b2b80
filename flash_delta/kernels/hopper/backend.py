"""The ``hopper`` backend: the delta rule with one decay per value head, forward, for sm_90a.

`rates` sums up the gates; one kernel does the rest (`loop`), inverse and all. Long sequences on few heads are walked in
segments, side by side (split.py): `factor`, `find_maps`, `compose`, `walk`. Heads of 256, whose states and chunks leave
no room for an inverse beside them, take `factor` and a `walk` of whole sequences. Whatever it cannot run, ``triton``
does, and so it does the backward pass: for that, forward saves what `solve` of that backend would have written.
"""

import torch
from torch import Tensor

from flash_delta.kernels.hopper import launch, launch_segments
from flash_delta.kernels.hopper.split import split_length
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton.launcher import Call, make_call, on, remember, replayed, run
from flash_delta.kernels.triton.tiles import chip_of
from flash_delta.kernels.triton.workspace import Solved, Workspace
from flash_delta.problem import Inputs, Outputs, Problem, addresses

FORWARD = ("hopper",)  # the kind of its calls
WIDTHS = (64, 128, 256)
WHOLE = 256  # too wide for the loop: A of all chunks first, then a walk of whole sequences

backward, empty_saved = triton.backward, triton.empty_saved


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" or chip_of(problem.device).target != "sm_90":
        return f"it needs a Hopper GPU (sm_90), the tensors are on {problem.device}"
    if problem.needs_grad and problem.disable_recompute:
        return "it keeps no states for the backward pass"
    if problem.recurrent or problem.pool is not None:
        return "it runs whole sequences, chunk by chunk, whose states are tensors of their own"
    if problem.gate == "channel" or problem.erase != "decayed":
        return "it runs the delta rule with one decay per value head or none, whose keys erase what they write"
    if problem.keep_states:
        return "it does not return the states of chunks"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its products are of 16 bits, the tensors are {problem.dtype}"
    if problem.K != problem.V or problem.K not in WIDTHS:
        return f"K and V have to be one of {', '.join(map(str, WIDTHS))}, both, they are {problem.K} and {problem.V}"
    if problem.scale <= 0:
        return f"scale has to be positive, it is {problem.scale}"
    return None


def forward(p: Problem, x: Inputs) -> Outputs:
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(p.state_shape, dtype=torch.float32, device=p.device)
    saved = Workspace(p, Solved) if p.needs_grad else None
    kept = () if saved is None else (saved.buffer,)
    if p.N * p.T == 0:  # nothing is launched, nor compiled, for nothing
        final.zero_() if x.initial_state is None else final.copy_(x.initial_state)
        return Outputs(o.zero_(), final, kept)
    if not replayed(p, _forward(p), addresses((*x, o, final, *kept, *kept))):  # A lies at its beginning
        with on(p.device):
            _launch_forward(p, x, o, final, saved)
    return Outputs(o, final, kept)


def _forward(p: Problem) -> tuple:
    """The kind of its calls."""
    return (*FORWARD, p.needs_grad)


def _launch_forward(p: Problem, given: Inputs, o: Tensor, final: Tensor, saved: Workspace | None) -> None:
    x = given._replace(q=_described(given.q), k=_described(given.k), v=_described(given.v))
    if x.initial_state is not None:
        x = x._replace(initial_state=x.initial_state.float().contiguous())
    rates = launch.new_rates(p)
    length = split_length(p, chip_of(p.device).processors)
    A = None if saved is None else saved.views()[0].A
    if p.K == WHOLE:
        walk = launch_segments.new_whole_walk(p, A)
    else:
        walk = None if length is None else launch_segments.new_walk(p, length, A)

    def kernels(c: Call) -> None:
        launch.run_rates(c, o, rates, None if saved is None else c.parts(saved)[0])
        compiling = c.compiling is not None and p.K != WHOLE  # both ways
        if walk is None or compiling:
            launch.run_loop(c, o, final, rates, A)
        if compiling:
            launch_segments.compile_walk(c, o, final, rates)
        elif walk is not None:
            launch_segments.run_walk(c, o, final, rates, walk)

    call = make_call(p, x, _forward(p), memo=p.memo)
    spare = (rates, *(t for t in (walk or ())[1:] if t is not A))
    run(call, kernels, o, final, *(() if saved is None else (saved.buffer, A)), spare=spare)
    remember(call, _forward(p), given)


def _described(t: Tensor) -> Tensor:
    """``t`` if the copy engine can describe its heads (launch.ragged), or a copy that it can."""
    row, token, head, channel = t.stride()
    fits = channel == 1 and token > 0 and token % 8 == 0 and head % 8 == 0 and row % token == 0
    return t if fits and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def remark(p: Problem) -> str | None:
    """What sizes decide, and who differentiates."""
    length, said = split_length(p, chip_of(p.device).processors), []
    if length is not None:
        number = -(-p.T // length)
        said.append(f"it walks sequences in segments of {length} tokens, up to {number} of them side by side")
    if p.needs_grad:
        said.append("its backward pass is that of 'triton'")
    return "; ".join(said) or None
