"""Stage ``step``: the recurrence for decoding, one token of every sequence at a time.

A step at batch 1 is a few operators on one state, so their number decides the time. Tensors are flattened to one batch
of value heads, and each product with the state is one call. Every token of every row is computed alone, also its
activations. (A vectorised sigmoid rounds differently depending on a number's place in a contiguous tensor.) So one call
with T tokens gives the same bits as T calls, and a row gives the same bits as alone.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import Inputs, KnownCall, Outputs, Problem
from flash_delta.reference.activation import l2norm, log_decay, strength
from flash_delta.reference.tokens import read_states, write_states

VECTOR = 32  # numbers in a vector of PyTorch, on a processor with the widest vectors
OF_A_THREAD = 32768  # up to so many numbers PyTorch does not split over threads


class Token(NamedTuple):
    """One token of n sequences after activations, as a batch of value heads."""

    q: Tensor  # [n HV, 1, K]
    k: Tensor  # [n HV, 1, K]
    p: Tensor  # [n HV, 1, K]; k, unless there are erase keys, or b . k
    v: Tensor  # [n HV, 1, V]; or w . v
    decay: Tensor | None  # e^g, [n HV, 1 or K, 1]
    b: Tensor | None  # beta, [n HV, 1, 1]


def step(problem: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """Run every sequence token by token; see ``flash_delta.reference.recurrent`` for the equations."""
    lengths, HV = problem.lengths, problem.HV
    order = starts = None
    if problem.packed:
        by_length = sorted(range(problem.N), key=lambda n: -lengths[n])  # the longest first: the active ones lead
        order = torch.tensor(by_length, dtype=torch.long, device="cpu")
        starts = torch.tensor([0, *accumulate(lengths)], device="cpu")[order].to(problem.device, non_blocking=True)
        order = order.to(problem.device, non_blocking=True)
    final_state = read_states(problem, order, x.initial_state)  # a copy, so that callers may write to it
    states = final_state.view(problem.N * HV, problem.K, problem.V)
    new = torch.zeros if problem.packed else torch.empty  # a packed row may be longer than its sequences
    o = new(x.v.shape, dtype=problem.dtype, device=problem.device)
    for t in range(max(lengths, default=0)):
        rows, live = None, states
        if problem.packed:
            n = sum(length > t for length in lengths)
            rows, live = starts[:n] + t, states[: n * HV]
        out = advance(problem, activated(problem, x, t, rows), live, live)  # [n HV, 1, V]
        if rows is None:
            o.select(1, t).copy_(out.view(problem.N, HV, -1))
        else:
            o[0].index_copy_(0, rows, out.view(n, HV, -1).to(o.dtype))
    return Outputs(o, write_states(problem, order, final_state))


def activated(problem: Problem, x: Inputs, t: int, rows: Tensor | None = None) -> Token:
    """Token t of every sequence that has one. ``rows``: their places in a packed row."""
    q, k, p = keys_at(problem, x, t, rows)
    v = at(x.v, t, rows).to(problem.accumulate).reshape(len(q), 1, -1)
    if problem.channel_strength:
        p = strength_at(problem, x.b, t, rows, problem.beta_range) * p
        v = strength_at(problem, x.w, t, rows, 1.0) * v
    decay = None if x.g is None else decay_at(problem, x, t, rows)
    b = None if x.beta is None else strength_at(problem, x.beta, t, rows, problem.beta_range)
    return Token(q, k, p, v, decay, b)


def advance(problem: Problem, x: Token, before: Tensor, S: Tensor) -> Tensor:
    """Runs `write`, and returns ``o [n HV, 1, V]``."""
    write(problem, x, before, S)
    return read(problem, x, S)


def read(problem: Problem, x: Token, S: Tensor) -> Tensor:
    """``scale q S``. With beta = 0, v is not read."""
    return torch.baddbmm(x.v, x.q, S, beta=0, alpha=problem.scale)


def write(problem: Problem, x: Token, before: Tensor, S: Tensor) -> Tensor:
    """Writes the state after ``before`` to ``S [n HV, K, V]`` and returns ``u [n HV, 1, V]``: what k has added. S may
    be ``before`` itself, and without a decay it has to be."""
    u = x.v
    if problem.erase == "undecayed":
        u = torch.baddbmm(u, x.p, before, alpha=-1)
    if x.decay is not None:
        torch.mul(before, x.decay, out=S)
    if problem.erase == "decayed":
        u = torch.baddbmm(u, x.p, S, alpha=-1)
    if x.b is not None:
        u = u * x.b
    S.addcmul_(x.k.mT, u)  # baddbmm_ takes 1.3 to 10 times as long (docs/notes)
    return u


def replay(before: Tensor, decay: Tensor, k: Tensor, u: Tensor, S: Tensor) -> None:
    """Writes the state after a token to S, from what `write` has used and returned."""
    torch.mul(before, decay, out=S)
    S.addcmul_(k.mT, u)


def at(x: Tensor, t: int, rows: Tensor | None) -> Tensor:
    """Token t of every sequence that has one: ``[B, T, ...]`` to ``[n, ...]``. ``rows``: their places in a packed
    row."""
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
    g = at(x.g, t, rows).to(problem.accumulate).contiguous()  # [n, HV] or [n, HV, K]
    if not problem.gate.raw:
        g = log_decay(problem.gate, g, None, None)
    else:
        shape = (problem.HV, -1) if g.dim() == 3 else (problem.HV,)
        rate = None if x.A_log is None else x.A_log.to(g.dtype).exp().reshape(shape)
        bias = None if x.dt_bias is None else x.dt_bias.to(g.dtype).reshape(shape)
        g = each_alone(lambda a: log_decay(problem.gate, a, rate, bias), g)
    return g.exp().reshape(g.shape[0] * problem.HV, -1, 1)


def strength_at(problem: Problem, x: Tensor, t: int, rows: Tensor | None, top: float) -> Tensor:
    """beta, b or w, ``[n HV, 1, 1 or width]``. ``top``: that of its sigmoid, if it is a logit."""
    b = at(x, t, rows).to(problem.accumulate).contiguous()
    b = each_alone(lambda z: strength(z, top), b) if problem.raw_beta else b
    return b.reshape(len(b) * problem.HV, 1, -1)


def each_alone(activate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Activates each row of a contiguous ``x`` with the bits that it has alone. All rows run together if each consists
    of whole vectors of PyTorch and threads do not split them. On a GPU a number's place does not matter."""
    if len(x) < 2 or x.device.type != "cpu" or (x[0].numel() % VECTOR == 0 and x.numel() <= OF_A_THREAD):
        return activate(x)
    return torch.stack([activate(row) for row in x.unbind(0)])
