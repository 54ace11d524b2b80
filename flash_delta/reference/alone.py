"""Runs sequences one by one, for batch invariance. Then no operator's size depends on other sequences."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.problem import Inputs, KnownCall, Outputs, Problem
from flash_delta.reference import chunked
from flash_delta.reference.tokens import PER_TOKEN


class Sequence(NamedTuple):
    problem: Problem  # of this sequence alone
    x: Inputs
    n: slice  # where it is among the N sequences
    tokens: tuple[slice, slice]  # where it is in [B, T]


def forward(problem: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """Runs the forward pass. With ``batch_invariant`` sequences run one by one, and nothing is saved: the backward pass
    computes everything again."""
    if not problem.batch_invariant or problem.N == 0:
        return chunked.forward(problem, x, known)
    o = x.v.new_zeros(x.v.shape)
    final = torch.empty(problem.state_shape, dtype=problem.accumulate, device=problem.device)
    states = []
    for one in sequences(problem._replace(needs_grad=False), x):
        o[one.tokens], final[one.n], _, kept, _ = chunked.forward(one.problem, one.x)
        states.append(kept)
    return Outputs(o, final, (), torch.cat(states, int(problem.packed)) if problem.keep_states else None)


def backward(
    problem: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None,
    known: KnownCall | None = None,
) -> Inputs:  # fmt: skip
    """Returns the gradients of `chunked.backward`. With ``batch_invariant`` sequences run one by one."""
    if not problem.batch_invariant or problem.N == 0:
        return chunked.backward(problem, x, saved, do, dfinal, known)
    given = x
    x = x._replace(A_log=_wide(problem, x.A_log), dt_bias=_wide(problem, x.dt_bias))  # sums of N terms
    d = Inputs(*(None if t is None else t.new_zeros(t.shape) for t in x))
    for one in sequences(problem, x):
        found = chunked.backward(one.problem, one.x, (), do[one.tokens], None if dfinal is None else dfinal[one.n])
        for name, total, part in zip(d._fields, d, found, strict=True):
            if part is not None:
                total[one.tokens if name in PER_TOKEN else one.n if name == "initial_state" else ...] += part
    return d._replace(
        cu_seqlens=None,
        A_log=None if x.A_log is None else d.A_log.to(given.A_log.dtype),
        dt_bias=None if x.dt_bias is None else d.dt_bias.to(given.dt_bias.dtype),
    )


def sequences(problem: Problem, x: Inputs) -> Iterator[Sequence]:
    start = 0
    for n, length in enumerate(problem.lengths):
        row = 0 if problem.packed else n
        tokens, own = (slice(row, row + 1), slice(start, start + length)), slice(n, n + 1)
        start += length if problem.packed else 0
        one = problem._replace(B=1, T=length, N=1, lengths=(length,), packed=False, batch_invariant=False)
        given = {name: t[tokens] for name in PER_TOKEN if (t := getattr(x, name)) is not None}
        state = None if x.initial_state is None else x.initial_state[own]
        yield Sequence(one, x._replace(**given, initial_state=state, cu_seqlens=None), own, tokens)


def _wide(problem: Problem, t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(problem.accumulate)
