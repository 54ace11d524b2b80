"""The ``triton`` backend: the chunkwise algorithm on NVIDIA and AMD GPUs, gate kinds none and scalar.

``solve`` and ``factor`` turn every chunk into a map of the state (A, then X and Y), all chunks at once; ``scan`` walks
the state through them. Backward: ``factor`` and ``scan`` again for the states, ``scan_backward`` right to left, then
``pairs`` and the kernels of ``gradients`` for all chunks at once. Forward keeps what ``solve`` wrote for the backward
pass, and with ``disable_recompute`` the rest.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import triton
from torch import Tensor

from flash_delta.kernels.triton import launch
from flash_delta.kernels.triton.chunk import C, count_slots
from flash_delta.kernels.triton.launch import Factors, Residual, Solved
from flash_delta.kernels.triton.launcher import Call, make_call, run
from flash_delta.kernels.triton.tiles import chip_of, widest_float32
from flash_delta.problem import Inputs, Outputs, Problem

WIDTHS = range(8, 257, 8)


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"it needs a GPU, the tensors are on {problem.device}"
    if problem.recurrent:
        return "it runs whole chunks, not token by token"
    if problem.gate == "channel":
        return "it has no decay per channel yet"
    if problem.dtype == torch.float64:
        return "it computes in float32, the tensors are float64"
    if problem.K not in WIDTHS or problem.V not in WIDTHS:
        return f"K and V have to be multiples of 8 up to 256, they are {problem.K} and {problem.V}"
    widest = widest_float32(chip_of(problem.device))
    if problem.dtype == torch.float32 and max(problem.K, problem.V) > widest:
        return f"in float32 K and V fit this chip up to {widest}, they are {problem.K} and {problem.V}"
    return None


def empty_saved(p: Problem, x: Inputs) -> tuple[Tensor, ...]:
    """What ``forward`` saves, not yet filled: what `solve` writes, and with ``disable_recompute`` all the rest."""
    solved = _present(*launch.new_solved(p))
    return (*solved, *launch.new_factors(p), *launch.new_residual(p)) if p.disable_recompute else solved


def forward(p: Problem, x: Inputs) -> Outputs:
    o = torch.empty(x.v.shape, dtype=p.dtype, device=p.device)
    final = torch.empty(p.state_shape, dtype=torch.float32, device=p.device)
    solved, factors = launch.new_solved(p), launch.new_factors(p)
    residual = launch.new_residual(p) if p.needs_grad and p.disable_recompute else None

    def kernels(c: Call) -> None:
        launch.run_solve(c, solved)
        launch.run_factor(c, solved, factors)
        launch.run_scan(c, solved.A, factors, o, final, residual)

    with _on(p.device):
        run(make_call(p, x, ("forward", residual is None)), kernels)
    if not p.needs_grad:
        return Outputs(o, final)
    return Outputs(o, final, _present(*solved) if residual is None else _present(*solved, *factors, *residual))


def backward(p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None) -> Inputs:
    """Gradients of ``o`` and ``final_state`` with respect to every input, in the inputs' dtypes.

    ``saved`` is what ``forward`` saved for the same problem; empty, it is computed again.
    """
    solved, factors, residual = _restore(p, saved)
    solved_again, factored_again = solved is None, factors is None
    solved = solved or launch.new_solved(p)
    factors, residual = factors or launch.new_factors(p), residual or launch.new_residual(p)
    chain, d, slots = launch.new_chain(p), launch.new_gradients(x), count_slots(p)
    new = partial(torch.empty, slots, p.HV, device=p.device)
    scores = (new(C, C, dtype=p.dtype), new(C, C, dtype=p.dtype))
    parts = None if x.g is None else new(4, C, dtype=torch.float32)
    dA_log, ddt_bias = (None if t is None else new(dtype=torch.float32) for t in (x.A_log, x.dt_bias))

    def kernels(c: Call) -> None:
        if solved_again:
            launch.run_solve(c, solved)
        if factored_again:
            launch.run_factor(c, solved, factors)
            launch.run_scan(c, solved.A, factors, None, None, residual)
        launch.run_scan_backward(c, factors, do, dfinal, chain, d.initial_state)
        launch.run_pairs(c, solved, residual, chain, do, d, scores, parts)
        launch.run_query_gradients(c, solved, factors, residual, do, d.q, scores, parts)
        launch.run_key_gradients(c, solved, factors, residual, chain, d, scores, parts)
        if parts is not None:
            launch.run_gates(c, solved, parts, d.g, dA_log, ddt_bias)

    with _on(p.device):
        run(make_call(p, x, ("backward", solved_again, factored_again), do, dfinal), kernels)
    return d._replace(A_log=_summed(dA_log, x.A_log), dt_bias=_summed(ddt_bias, x.dt_bias))


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


def _restore(p: Problem, saved: tuple[Tensor, ...]) -> tuple[Solved | None, Factors | None, Residual | None]:
    """What was saved."""
    if not saved:
        return None, None, None
    tensors = iter(saved)
    solved = Solved(None if p.erase is None else next(tensors), next(tensors), next(tensors) if p.l2norm else None)
    rest = tuple(tensors)
    return (solved, Factors(*rest[:3]), Residual(*rest[3:])) if rest else (solved, None, None)


def _summed(sums: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a parameter per head, from its float32 sums per chunk."""
    return None if like is None else sums.sum(0).reshape(like.shape).to(like.dtype)


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
