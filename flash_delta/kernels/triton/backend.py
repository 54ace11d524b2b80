"""The ``triton`` backend: the chunkwise algorithm on NVIDIA and AMD GPUs.

``solve`` and ``factor`` turn every chunk into a map of the state (A, then X and Y), all chunks at once; ``scan`` walks
the state through them. With a decay per channel ``channel`` forms all that depends on it, for ``solve`` and, instead of
``factor``, for ``scan``. Backward: ``factor`` (``channel``) again, ``scan`` for the states and beside it
``scan_backward`` right to left, then ``pairs`` and the kernels of ``gradients`` (``channel_gradients``,
``halved_gradients``, ``key_head_gradients``) for all chunks at once. Forward keeps what ``solve`` wrote for the
backward pass, and with ``disable_recompute`` the rest.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import triton
from torch import Tensor

from flash_delta.kernels.triton import launch
from flash_delta.kernels.triton.chunk import count_slots
from flash_delta.kernels.triton.launcher import Call, make_call, run
from flash_delta.kernels.triton.tiles import chip_of, widest_float32
from flash_delta.kernels.triton.workspace import (
    Chain,
    Channels,
    Factors,
    HeadGradients,
    Residual,
    Scores,
    Solved,
    Workspace,
)
from flash_delta.problem import Inputs, Outputs, Problem, Slots

WIDTHS = range(8, 257, 8)


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"it needs a GPU, the tensors are on {problem.device}"
    if problem.pool is not None:
        return _cannot_decode(problem)
    if problem.recurrent:
        return "it runs whole chunks, not token by token"
    if problem.keep_states:
        return "it does not return the states of chunks"
    if problem.dtype == torch.float64:
        return "it computes in float32, the tensors are float64"
    if problem.K not in WIDTHS or problem.V not in WIDTHS:
        return f"K and V have to be multiples of 8 up to 256, they are {problem.K} and {problem.V}"
    if problem.dtype != torch.float32:
        return None
    widest = widest_float32(chip_of(problem.device))
    if max(problem.K, problem.V) > widest:
        return f"in float32 K and V fit this chip up to {widest}, they are {problem.K} and {problem.V}"
    return None


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """What ``forward`` saves, not yet filled: what `solve` writes, and with ``disable_recompute`` all the rest."""
    fixed = p._replace(H=int(p.H), HV=int(p.HV), K=int(p.K), V=int(p.V))  # never symbols: kernels are compiled for them
    return (_saved(fixed).buffer,)


def forward(p: Problem, x: Inputs) -> Outputs:
    x = _with_flat_parameters(x)
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    final = x.v.new_empty(p.state_shape, dtype=torch.float32)
    kept = p.needs_grad and p.disable_recompute
    if not p.needs_grad:
        memory = (Workspace(p, Solved, Factors, Channels),)
    else:
        memory = (_saved(p),) if kept else (_saved(p), Workspace(p, Factors, Channels))

    def kernels(c: Call) -> None:
        solved, factors, channels, residual = (*c.parts(*memory), None)[:4]
        if p.gate == "channel":
            launch.run_channel(c, solved, channels)
        launch.run_solve(c, channels, solved)
        if p.gate != "channel":
            launch.run_factor(c, solved, factors)
        launch.run_scan(c, channels, solved, factors, o, final, residual)

    with _on(p.device):
        call = make_call(p, x, ("forward", kept), memo=p.memo)
        run(call, kernels, o, final, *(w.buffer for w in memory))
    return Outputs(o, final, (memory[0].buffer,) if p.needs_grad else ())


def backward(p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None) -> Inputs:
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem; empty, it is computed again.
    """
    again, kept = not saved, p.disable_recompute
    recompute = again or not kept
    x = _with_flat_parameters(x)
    own = () if kept else (Factors, Channels, Residual)
    memory = _saved(p, *saved), Workspace(p, *own, Chain, Scores, HeadGradients)
    d, widths = launch.new_gradients(x), (p.K,) if p.gate == "channel" else ()
    new = partial(torch.empty, count_slots(p), p.HV, *widths, dtype=torch.float32, device=p.device)
    dA_log, ddt_bias = (None if t is None else new() for t in (x.A_log, x.dt_bias))

    def kernels(c: Call) -> None:
        solved, factors, channels, residual, chain, scores, heads = c.parts(*memory)
        do, dfinal = c.more
        if p.gate == "channel" and recompute:
            launch.run_channel(c, solved, channels)
        if again:
            launch.run_solve(c, channels, solved)
        if p.gate != "channel" and recompute:
            launch.run_factor(c, solved, factors, follows=again)
        launch.run_scan_backward(
            c, channels, solved, factors, residual, do, dfinal, chain, d.initial_state, recompute=recompute
        )
        launch.run_pairs(c, channels, solved, residual, chain, do, d, scores, heads)
        if p.gate == "channel":
            if p.dtype == torch.bfloat16:
                launch.run_channel_gradients(c, scores, heads, d.g, dA_log, ddt_bias)
            if launch.needs_halving(p):
                launch.run_halved_gradients(c, solved, residual, chain, do, scores, heads, d.g, dA_log, ddt_bias)
            launch.run_key_head_gradients(c, solved, heads, d)
            return
        launch.run_query_gradients(c, solved, factors, residual, do, d.q, scores)
        launch.run_key_gradients(c, solved, factors, residual, chain, d, scores)
        if p.gate == "scalar":
            launch.run_gates(c, solved, scores, d.g, dA_log, ddt_bias)

    with _on(p.device):
        call = make_call(p, x, ("backward", again, kept), do, dfinal)
        run(call, kernels, *d, dA_log, ddt_bias, *(w.buffer for w in memory))
    return d._replace(A_log=_summed(dA_log, x.A_log), dt_bias=_summed(ddt_bias, x.dt_bias))


def decode(p: Problem, x: Inputs, s: Slots) -> Tensor:
    """``o``, contiguous; the pool is written in place."""
    x = _with_flat_parameters(x)
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    with _on(p.device):
        run(make_call(p, x, ("decode",), *s, memo=p.memo), partial(launch.run_decode, o=o), o)
    return o


def _cannot_decode(p: Problem) -> str | None:
    if torch.float64 in (p.dtype, p.pool):
        return f"it computes in float32, the tensors are {p.dtype}, the pool is {p.pool}"
    if not 0 < min(p.K, p.V) <= max(p.K, p.V) <= WIDTHS[-1]:
        return f"K and V have to be from 1 to {WIDTHS[-1]}, they are {p.K} and {p.V}"
    return None


def _with_flat_parameters(x: Inputs) -> Inputs:
    """Parameters per head with their elements side by side, as they nearly always are."""
    A_log, dt_bias = x.A_log, x.dt_bias
    if A_log is not None and not A_log.is_contiguous():
        x = x._replace(A_log=A_log.contiguous())
    if dt_bias is not None and not dt_bias.is_contiguous():
        x = x._replace(dt_bias=dt_bias.contiguous())
    return x


def _saved(p: Problem, buffer: Tensor | None = None) -> Workspace:
    """What forward saves for backward, and with ``disable_recompute`` all of it."""
    groups = (Solved, Factors, Channels, Residual) if p.disable_recompute else (Solved,)
    return Workspace(p, *groups, buffer=buffer)


def _summed(sums: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a parameter, from its float32 sums per chunk and head, or per chunk, head and channel."""
    if like is None:
        return None
    over = 0 if like.numel() == sums.shape[1:].numel() else (0, 2)
    return sums.sum(over).reshape(like.shape).to(like.dtype)


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
