"""Stage ``step``: the recurrence one token of every sequence at a time, for decoding.

A step at batch 1 is a handful of operators on one state, so what counts is their number: tensors are flattened to one
batch of value heads, and each product with the state is one call. Every position is computed alone, also its
activations (a vectorised sigmoid rounds by where in a tensor a number lies), so that T tokens in one call give bitwise
what T calls give.
"""

from itertools import accumulate

import torch
from torch import Tensor

from flash_delta.problem import Inputs, Outputs, Problem
from flash_delta.reference.activation import l2norm, log_decay, strength
from flash_delta.reference.tokens import read_states, write_states


def step(problem: Problem, x: Inputs) -> Outputs:
    """Run every sequence token by token; see ``flash_delta.reference.recurrent`` for the equations."""
    lengths, HV = problem.lengths, problem.HV
    order = starts = None
    if problem.packed:
        by_length = sorted(range(problem.N), key=lambda n: -lengths[n])  # the longest first: the active ones lead
        order = torch.tensor(by_length, dtype=torch.long)
        starts = torch.tensor([0, *accumulate(lengths)])[order].to(problem.device, non_blocking=True)
        order = order.to(problem.device, non_blocking=True)
    states = read_states(problem, order, x.initial_state).view(problem.N * HV, problem.K, problem.V)
    new = torch.zeros if problem.packed else torch.empty  # a packed row may be longer than its sequences
    o = new(x.v.shape, dtype=problem.dtype, device=problem.device)
    for t in range(max(lengths, default=0)):
        rows, live = None, states
        if problem.packed:
            n = sum(length > t for length in lengths)
            rows, live = starts[:n] + t, states[: n * HV]
        out = advance(problem, x, t, rows, live)  # [n HV, 1, V]
        if rows is None:
            o.select(1, t).copy_(out.view(problem.N, HV, -1))
        else:
            o[0].index_copy_(0, rows, out.view(n, HV, -1).to(o.dtype))
    return Outputs(o, write_states(problem, order, states.view(problem.N, HV, problem.K, problem.V)))


def advance(problem: Problem, x: Inputs, t: int, rows: Tensor | None, S: Tensor) -> Tensor:
    """Token t: ``S [n HV, K, V]`` is advanced in place; returns ``o [n HV, 1, V]``."""
    q, k, p = keys_at(problem, x, t, rows)  # [n HV, 1, K]
    u = at(x.v, t, rows).to(S.dtype).reshape(len(S), 1, -1)
    if problem.erase == "undecayed":
        u = torch.baddbmm(u, p, S, alpha=-1)
    if x.g is not None:
        S.mul_(decay_at(problem, x, t, rows))
    if problem.erase == "decayed":
        u = torch.baddbmm(u, p, S, alpha=-1)
    if x.beta is not None:
        u = u * strength_at(problem, x, t, rows)
    S.baddbmm_(k.mT, u)
    return torch.baddbmm(u, q, S, beta=0, alpha=problem.scale)  # scale q S; with beta = 0 nothing of u is read


def at(x: Tensor, t: int, rows: Tensor | None) -> Tensor:
    """Token t of every sequence that has one: ``[B, T, ...]`` to ``[n, ...]``; ``rows`` of the packed row."""
    return x.select(1, t) if rows is None else x[0].index_select(0, rows)


def keys_at(problem: Problem, x: Inputs, t: int, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and p (k, unless there are erase keys) per value head, each ``[n HV, 1, K]``."""
    keys = torch.stack([at(key, t, rows) for key in (x.q, x.k, x.p) if key is not None]).to(problem.accumulate)
    if problem.l2norm:
        keys, _ = l2norm(keys)
    keys = keys.unsqueeze(3).expand(-1, -1, -1, problem.HV // problem.H, -1).reshape(len(keys), -1, 1, problem.K)
    q, k, *p = keys.unbind(0)
    return q, k, p[0] if p else k


def decay_at(problem: Problem, x: Inputs, t: int, rows: Tensor | None) -> Tensor:
    """e^g, ``[n HV, 1 or K, 1]``."""
    g = at(x.g, t, rows).to(problem.accumulate)  # [n, HV] or [n, HV, K]
    if problem.raw_gate:
        shape = (problem.HV, -1) if g.dim() == 3 else (problem.HV,)
        rate = None if x.A_log is None else x.A_log.to(g.dtype).exp().reshape(shape)
        bias = None if x.dt_bias is None else x.dt_bias.to(g.dtype).reshape(shape)
        g = log_decay(g, rate, bias, problem.lower_bound)
    return g.exp().reshape(g.shape[0] * problem.HV, -1, 1)


def strength_at(problem: Problem, x: Inputs, t: int, rows: Tensor | None) -> Tensor:
    """beta, ``[n HV, 1, 1]``."""
    b = at(x.beta, t, rows).to(problem.accumulate)
    return (strength(b, problem.beta_range) if problem.raw_beta else b).reshape(-1, 1, 1)
