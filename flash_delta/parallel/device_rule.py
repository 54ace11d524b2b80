r"""The delta rule over ranks whose bounds only the device knows.

`flash_delta.parallel.delta_rule` has the mathematics. There the host picks the pieces that continue. Here every rank
sends one map (Phi, B), and marks that were computed on the device say what it means:

    S_{r+1} = crossed_{r+1} (B_r + spans_r Phi_r S_r)                           S_r: at the first token of rank r
    dS_r = crossed_{r+1} (D_{r+1} + spans_{r+1} Phi_{r+1}^T dS_{r+1})           dS_r: at its last token

B_r is the final state of the rank's last row, which starts from zero if its sequence began on an earlier rank. A rank
with tokens before it and after it runs the op three times forward: from zero for B, from the identity for r and Phi,
and from the right states for o. Bounds leave out what a run does not need, and kernels skip tokens after the last
bound. The first rank runs the op once, and the last one not for B.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_delta.parallel.cut import Cut
from flash_delta.parallel.delta_rule import LocalRun, Response, respond, sum_of_products
from flash_delta.parallel.part import Part
from flash_delta.problem import Inputs


class Neighbours(NamedTuple):
    """The ranks with tokens before this one and after it, in order. A rank without tokens has none."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, context: Part) -> "Neighbours":
        full = [rank for rank in range(context.size) if context.split.tokens(rank)]
        if context.rank not in full:
            return cls((), ())
        at = full.index(context.rank)
        return cls(tuple(full[:at]), tuple(full[at + 1 :]))


def delta_rule_on_device(context: Part, cut: Cut, run: LocalRun, x: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [1, T, HV, V], final_state [N, HV, K, V])`` for this rank's tokens and a row for each sequence."""
    if context.size == 1:
        return run(x, None)
    near = Neighbours.of(context)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    x = x._replace(initial_state=_initial(cut, x))
    results = None if near.before else run(x, None)
    with torch.no_grad():
        response = _respond(context, cut, run, x, needs_grad) if near.before and near.after else None
        maps, work = context.gather(_map(context, cut, run, x, near, results, response))
        if near.before and response is None and needs_grad:
            response = _respond(context, cut, run, x, needs_grad)
        work.wait()
        if near.before:
            state = _state_at_start(cut, (*near.before, context.rank), maps)
    if near.before:
        state = state.where(cut.continued[:, None, None, None], x.initial_state)
        results = run(x._replace(initial_state=state), None)
    if not needs_grad:
        return results
    passed = maps[context.rank + 1 :, ..., : x.q.shape[-1]].clone()  # so that the rest of maps can be freed
    return _Crossing.apply(context, near, passed, *(response or (None, None)), *cut, *results)


class _Crossing(torch.autograd.Function):
    """Returns o and the final states. In the backward pass, adds what comes from the right to the states' gradients."""

    @staticmethod
    def forward(
        ctx, context: Part, near: Neighbours, passed: Tensor, r: Tensor | None, Phi: Tensor | None, *others: Tensor
    ):
        *cut, o, final = others
        ctx.context, ctx.near, ctx.shape, ctx.dtype = context, near, final.shape, final.dtype
        ctx.save_for_backward(passed, r, Phi, *cut)  # so that bounds written before the backward pass are an error
        ctx.set_materialize_grads(False)
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None):
        passed, r, Phi, *cut = ctx.saved_tensors
        context, cut = ctx.context, Cut(*cut)
        D = torch.zeros(ctx.shape[1:], dtype=ctx.dtype, device=passed.device)
        if r is not None and do is not None:
            tokens = torch.arange(context.tokens, device=do.device)
            D += sum_of_products(r[0], do[0].where((tokens < _head(context, cut))[:, None, None], 0))
        if r is not None and dfinal is not None:
            dS = dfinal.index_select(0, cut.first[context.rank, None])[0]
            D += (Phi[0].mT.double() @ dS.double()).to(ctx.dtype)
        everyones, work = context.gather(D)
        work.wait()
        if ctx.near.after:
            dS = _gradient_of_end(context, cut, ctx.near, passed, everyones)
            dS = dS.where(cut.continues[:, None, None, None], 0)
            dfinal = dS if dfinal is None else dfinal + dS
        return (None,) * (5 + len(cut)) + (do, dfinal)


def _initial(cut: Cut, x: Inputs) -> Tensor:
    """The initial states [N, HV, K, V] of the sequences that begin on this rank, and zeros."""
    if x.initial_state is not None:
        return x.initial_state.where(cut.begins[:, None, None, None], 0)
    (HV, V), K = x.v.shape[2:], x.q.shape[-1]
    return x.q.new_zeros(len(cut.begins), HV, K, V, dtype=torch.promote_types(x.q.dtype, torch.float32))


def _head(context: Part, cut: Cut) -> Tensor:
    """How many tokens of this rank belong to a sequence that began on an earlier one, [1]."""
    return cut.bounds.index_select(0, cut.first[context.rank, None] + 1).where(cut.crossed[context.rank], 0)


def _respond(context: Part, cut: Cut, run: LocalRun, x: Inputs, needs_grad: bool) -> Response:
    """The response of the row that came from the left. Without gradients only a sequence that goes on needs it."""
    head = _head(context, cut)
    if not needs_grad:
        head = head.where(cut.spans[context.rank], 0)
    return respond(run, x._replace(cu_seqlens=torch.cat([torch.zeros_like(head), head])))


def _map(
    context: Part, cut: Cut, run: LocalRun, x: Inputs, near: Neighbours,
    results: tuple[Tensor, Tensor] | None, response: Response | None,
) -> Tensor:  # fmt: skip
    """The map [HV, K, K + V] of this rank's last row. It is of no use if the row does not continue."""
    (HV, V), K = x.v.shape[2:], x.q.shape[-1]
    if not near.after:
        return x.q.new_zeros(HV, K, K + V, dtype=torch.promote_types(x.q.dtype, torch.float32))
    if results is None:
        results = run(x._replace(cu_seqlens=cut.bounds.where(cut.continues.any(), 0)), None)
    B = results[1].index_select(0, cut.last[context.rank, None])[0]
    Phi = B.new_zeros(HV, K, K) if response is None else response.Phi[0]
    return torch.cat([Phi, B], dim=-1)


def _state_at_start(cut: Cut, ranks: tuple[int, ...], maps: Tensor) -> Tensor:
    """The state [HV, K, V] at the first token of the last of ``ranks``, of all maps [P, HV, K, K + V]."""
    K, S = maps.shape[-2], None
    for rank, after in pairwise(ranks):
        Phi, B = maps[rank].double().tensor_split([K], dim=-1)
        S = B if S is None else B + (Phi @ S).where(cut.spans[rank], 0)
        S = S.where(cut.crossed[after], 0)
    return S.to(maps.dtype)


def _gradient_of_end(context: Part, cut: Cut, near: Neighbours, passed: Tensor, D: Tensor) -> Tensor:
    """The gradient [HV, K, V] of the end of this rank's last row, from ``D [P, HV, K, V]`` of all ranks."""
    dS = None
    for rank in reversed(near.after):
        own = D[rank].double()
        if dS is not None:
            Phi = passed[rank - context.rank - 1].double()
            own = own + (Phi.mT @ dS).where(cut.spans[rank], 0)
        dS = own.where(cut.crossed[rank], 0)
    return dS.to(D.dtype)
