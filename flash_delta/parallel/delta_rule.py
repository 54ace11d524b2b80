r"""The delta rule over ranks, composed of runs of the local op.

Take a piece whose sequence comes from the left. Let P_t be the product of the state's transitions up to token t:

    S_t = P_t S_in + S_t^0,        o_t = S_in^T r_t + o_t^0,        r_t = scale * P_t^T q_t

where ^0 means: from a zero state. The op with v = 0 and the identity as initial state returns r as its output, and Phi,
the last P_t, as its final state. From a zero state the op returns B, the last S_t^0. Ranks gather (Phi, B) of all
pieces. Each rank composes those to the left of its own pieces, in float64, and runs the op from S_in. Autograd sees
only this run.

In the backward pass the state's gradient goes from right to left. dO alone sends this to a piece's start:

    D = sum_t r_t do_t^T        (+ Phi^T dS of its end, if the caller used the state there)

This is one matrix product with r of the forward pass. So D is known before the op's backward pass, which needs the
gradient from the right. Ranks gather D, and each composes, for the ends of its pieces,

    dS_end = D_1 + Phi_1^T (D_2 + Phi_2^T (D_3 + ...)),        1, 2, 3, ... the pieces to the right.

With dS_end the op's backward pass gives all gradients. Autograd does not differentiate Phi and B, because S_in and
dS_end are the same as on one device, up to rounding.

A piece whose sequence began in an earlier piece is called continued. The other pieces do not wait for other ranks. They
run during the exchange, unless the end of one of them is part of the exchange. Continued pieces run three times forward
if one of them continues to the right: for B, for r and Phi, and for o. Otherwise they run twice: for r and Phi, only if
there are gradients and during the exchange, and for o. All other pieces run once forward, and all run once backward.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flash_delta.parallel.compose import gradients_of_ends, passed_through, rows_of, states_at_starts
from flash_delta.parallel.part import Part
from flash_delta.problem import Inputs

LocalRun = Callable[[Inputs, "Sequence[int] | None"], tuple[Tensor, Tensor]]  # the op: inputs, bounds -> o, final_state
OF_TOKENS = ("q", "k", "v", "g", "beta", "p", "b", "w")


class Response(NamedTuple):
    """How continued pieces depend on the states that they start from."""

    r: Tensor  # [1, T of these, HV, K], in q's dtype
    Phi: Tensor  # [n, HV, K, K]


class Some(NamedTuple):
    """Some of a rank's pieces, as a call of the op."""

    rows: tuple[int, ...]  # the numbers of the pieces
    x: Inputs
    bounds: tuple[int, ...] | None  # None: a batch of one
    stretches: tuple[int, ...]  # numbers of tokens in runs of neighbours

    def run(self, run: LocalRun, **inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        return run(self.x._replace(**inputs), self.bounds)


def delta_rule(context: Part, run: LocalRun, x: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [1, T, HV, V], final_state [N, HV, K, V])`` for this rank's tokens and rows.

    Args:
        context: the split.
        run: the op on this rank alone, given inputs and the host's copy of their ``cu_seqlens``.
        x: this rank's inputs; ``initial_state`` has a row for each of its pieces.
    """
    if not context.split.most_continuing:
        return run(x, context.bounds)
    continued, begun = _cut(context, x)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    early = begun is not None and any(context.continues[row] for row in begun.rows)
    others = begun.run(run) if early else None
    with torch.no_grad():
        sent, response = _summarize(context, run, continued, x, begun, others)
        maps, work = context.gather(sent)
        if continued is not None and response is None and needs_grad:
            response = respond(run, continued.x, continued.bounds)
    if begun is not None and others is None:
        others = begun.run(run)
    work.wait()
    maps = maps.flatten(0, 1)
    o, final_state = _joined(context, run, continued, begun, others, maps)
    if not needs_grad:
        return o, final_state
    passed = passed_through(context, x.q.shape[-1], maps)  # so that the rest of maps can be freed
    return _Crossing.apply(context, passed, *(response or (None, None)), o, final_state)


class _Crossing(torch.autograd.Function):
    """Returns o and the final states. In the backward pass, adds what comes from the right to the states' gradients."""

    @staticmethod
    def forward(ctx, context: Part, passed: Tensor, r: Tensor | None, Phi: Tensor | None, o: Tensor, final: Tensor):
        ctx.context, ctx.map = context, (final.shape[1:], final.dtype, final.device)
        ctx.save_for_backward(passed, r, Phi)
        ctx.set_materialize_grads(False)
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None):
        context, (shape, dtype, device) = ctx.context, ctx.map
        passed, r, Phi = ctx.saved_tensors
        D = torch.zeros((context.split.most_continued, *shape), dtype=dtype, device=device)
        at = 0
        for i, row in enumerate(row for row, continued in enumerate(context.continued) if continued):
            piece = context.rows[row]
            if do is not None:
                D[i] += sum_of_products(r[0, at : at + piece.tokens], do[0, piece.start : piece.stop])
            if dfinal is not None:
                D[i] += (Phi[i].mT.double() @ dfinal[row].double()).to(dtype)
            at += piece.tokens
        everyones, work = context.gather(D)
        work.wait()
        going = [row for row, continues in enumerate(context.continues) if continues]
        if going:
            dfinal = D.new_zeros(len(context.rows), *shape) if dfinal is None else dfinal.clone()
            for row, dS in zip(going, gradients_of_ends(context, going, passed, everyones.flatten(0, 1)), strict=True):
                dfinal[row] += dS
        return None, None, None, None, do, dfinal


def _cut(context: Part, x: Inputs) -> tuple[Some | None, Some | None]:
    """The continued pieces, and the other pieces with the padding. None if there are none."""
    rows = [(piece.continued, row, piece.tokens) for row, piece in enumerate(context.rows)]
    padding = context.tokens - context.bounds[-1]
    if not any(continued for continued, *_ in rows):
        return None, Some(tuple(range(len(rows))), x, context.bounds, (context.tokens,))
    tokens = [*rows, (False, None, padding)] if padding else rows
    stretches = [(kind, sum(n for *_, n in group)) for kind, group in groupby(tokens, key=lambda row: row[0])]
    pieces = {  # one split instead of slices, so that the backward pass is one concatenation
        name: t.split([n for _, n in stretches], dim=1)
        for name, t in x._asdict().items()
        if name in OF_TOKENS and t is not None
    }

    def some(kind: bool) -> Some | None:
        if not any(continued == kind for continued, _ in stretches):
            return None
        ours = tuple(row for continued, row, _ in rows if continued == kind)
        bounds = (0, *accumulate(n for continued, _, n in rows if continued == kind))
        alone = kind and len(ours) == 1
        inputs = {name: _together([t for t, (k, _) in zip(ts, stretches, strict=True) if k == kind], 1)
                  for name, ts in pieces.items()}  # fmt: skip
        inputs["initial_state"] = None if kind or x.initial_state is None else rows_of(x.initial_state, ours)
        inputs["cu_seqlens"] = None if alone else context.place(bounds, x.q.device)
        return Some(ours, x._replace(**inputs), None if alone else bounds, tuple(n for k, n in stretches if k == kind))

    return some(True), some(False)


def _summarize(
    context: Part, run: LocalRun, continued: Some | None, x: Inputs, begun: Some | None,
    others: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Response | None]:  # fmt: skip
    """The maps [M, HV, K, K + V] of states through this rank's pieces that continue, and zeros if another rank has more
    of them. ``others``: the results of pieces that begin here, if one of them continues."""
    (HV, V), K = x.v.shape[2:], x.q.shape[-1]
    dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    maps_of: dict[int, Tensor] = {}
    if others is not None:
        maps_of = {row: F.pad(S, (K, 0)) for row, S in zip(begun.rows, others[1], strict=True)}  # nothing comes in
    response = None
    if continued is not None and any(context.continues[row] for row in continued.rows):
        response = respond(run, continued.x, continued.bounds)
        _, B = continued.run(run)
        maps_of |= zip(continued.rows, torch.cat([response.Phi, B], dim=-1), strict=True)
    maps = [maps_of[row] for row, continues in enumerate(context.continues) if continues]
    nothing = x.q.new_zeros(HV, K, K + V, dtype=dtype)
    return torch.stack(maps + [nothing] * (context.split.most_continuing - len(maps))), response


def respond(run: LocalRun, x: Inputs, bounds: tuple[int, ...] | None = None) -> Response:
    """The run of the op with v = 0 from the identity, on a row with ``x.cu_seqlens``. None: on a batch of one."""
    (_, T, HV), K = x.v.shape[:3], x.q.shape[-1]
    n = 1 if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    one = torch.eye(K, device=x.q.device).expand(n, HV, K, K).contiguous()
    v = x.v.new_zeros(1, T, HV, K)
    return Response(*run(x._replace(v=v, w=None if x.w is None else v, initial_state=one), bounds))


def _joined(
    context: Part, run: LocalRun, continued: Some | None, begun: Some | None, others: tuple[Tensor, Tensor] | None,
    maps: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All results of this rank. Continued pieces start from the states that ``maps`` give."""
    if continued is None:
        return others
    o, final_state = continued.run(run, initial_state=states_at_starts(context, continued.rows, maps))
    if others is None:
        return o, final_state
    parts = {True: iter(o.split(continued.stretches, 1)), False: iter(others[0].split(begun.stretches, 1))}
    kinds = [kind for kind, _ in groupby(context.continued)]
    kinds += [False] if len(kinds) < len(continued.stretches) + len(begun.stretches) else []  # padding
    order = [*continued.rows, *begun.rows]
    states = rows_of(torch.cat([final_state, others[1]]), [order.index(row) for row in range(len(order))])
    return torch.cat([next(parts[kind]) for kind in kinds], dim=1), states


def _together(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def sum_of_products(r: Tensor, do: Tensor) -> Tensor:
    """``sum_t r_t do_t^T`` [HV, K, V] of r [T, HV, K] and do [T, HV, V], in at least float32."""
    r, do = r.permute(1, 2, 0), do.transpose(0, 1)
    if r.dtype in (torch.float64, torch.float32):
        return torch.bmm(r, do)
    if r.is_cuda:  # operands in their own dtype, and sums that are not rounded
        return torch.bmm(r, do, out_dtype=torch.float32)
    return torch.bmm(r.float(), do.float())
