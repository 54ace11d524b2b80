r"""The delta rule over ranks: runs of the local op, composed.

Let P_t be the product of the state's transitions up to token t, for a sequence that comes from the left, so that

    S_t = P_t S_in + S_t^0,        o_t = S_in^T r_t + o_t^0,        r_t = scale * P_t^T q_t

(^0: from a zero state). The op with v = 0, from the identity, returns just these: r as its output, and as its final
state Phi, the last P_t. From zero it returns B, the last S_t^0. Ranks gather (Phi, B), each composes what lies to its
left, in float64, and runs the op from S_in. This run is all that autograd sees.

Backward, the state's gradient crosses from right to left. What dO alone sends to a rank's start is

    D = sum_t r_t do_t^T        (+ Phi^T dS of its end, where the caller used the state there)

one matrix product with what forward left: it is known before the op's backward pass, which needs what comes from the
right. Ranks gather D, and each composes for the end of its last sequence

    dS_end = D_1 + Phi_1^T (D_2 + Phi_2^T (D_3 + ...)),        1, 2, 3, ... the ranks to the right.

With it the op's backward pass gives all gradients. Nothing is differentiated through Phi and B: S_in and dS_end are
what they are on one device, up to rounding.

A rank's first sequence is its head, if it began on an earlier rank. The others need nothing from there: they are run by
themselves, during the exchange unless the end of the last one is part of it. A head is run three times forward if it
continues to the right (B, r and Phi, o), twice if it ends here (r and Phi, only for gradients and during the exchange,
and o); everything else once, and everything once backward.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flash_delta.parallel.part import Part
from flash_delta.problem import Inputs

LocalRun = Callable[[Inputs, "Sequence[int] | None"], tuple[Tensor, Tensor]]  # the op: inputs, bounds -> o, final_state
OF_TOKENS = ("q", "k", "v", "g", "beta", "p")


class Response(NamedTuple):
    """How a rank's head depends on the state that it starts from."""

    r: Tensor  # [1, T of the head, HV, K], in q's dtype
    Phi: Tensor  # [HV, K, K]


def delta_rule(context: Part, run: LocalRun, x: Inputs) -> tuple[Tensor, Tensor]:
    """``(o [1, T, HV, V], final_state [N, HV, K, V])`` of this rank's tokens and sequences.

    Args:
        context: the split.
        run: the op on this rank alone, given inputs and the host's copy of their ``cu_seqlens``.
        x: this rank's inputs; ``initial_state`` has a row for each of its sequences.
    """
    head, rest = _cut(context, x)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    others = run(*rest) if rest is not None and context.continues else None
    with torch.no_grad():
        sent, response = _summarize(context, run, head, x, None if others is None else others[1][-1])
        maps, work = context.gather(sent)
        if head is not None and response is None and needs_grad:
            response = _respond(run, head)
    if rest is not None and others is None:
        others = run(*rest)
    work.wait()
    if head is None:
        o, final_state = others
    else:
        S = _compose(maps[context.left.start : context.left.stop])
        o, final_state = run(head._replace(initial_state=S[None]), None)
        if others is not None:
            o, final_state = torch.cat([o, others[0]], dim=1), torch.cat([final_state, others[1]])
    if not needs_grad:
        return o, final_state
    right, K = context.right[:-1], x.q.shape[-1]  # where the sequence ends, nobody asks what would go through
    between = maps[right.start : right.stop, ..., :K].clone()  # and the rest of maps may go
    return _Crossing.apply(context, between, *(response or (None, None)), o, final_state)


class _Crossing(torch.autograd.Function):
    """Lets o and the final states through; backward, adds to the last one's gradient what comes from the right."""

    @staticmethod
    def forward(ctx, context: Part, between: Tensor, r: Tensor | None, Phi: Tensor | None, o: Tensor, final: Tensor):
        ctx.context, ctx.map = context, (final.shape[1:], final.dtype, final.device)
        ctx.save_for_backward(between, r, Phi)
        ctx.set_materialize_grads(False)
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor | None, dfinal: Tensor | None):
        context, (shape, dtype, device) = ctx.context, ctx.map
        between, r, Phi = ctx.saved_tensors
        D = torch.zeros(shape, dtype=dtype, device=device)
        if r is not None and do is not None:
            D += _sum_of_products(r[0], do[0, : r.shape[1]])
        if r is not None and dfinal is not None:
            D += (Phi.mT.double() @ dfinal[0].double()).to(dtype)
        everyones, work = context.gather(D)
        work.wait()
        if context.continues:
            dS = _compose_back(between, everyones[context.right.start : context.right.stop])
            dfinal = dS.new_zeros(len(context.sequences), *shape) if dfinal is None else dfinal.clone()
            dfinal[-1] += dS
        return None, None, None, None, do, dfinal


def _cut(context: Part, x: Inputs) -> tuple[Inputs | None, tuple[Inputs, Sequence[int]] | None]:
    """The head, as a batch of one, and the other sequences with their bounds; None for what there is not."""
    if not context.continued:
        return None, (x, context.bounds)
    tokens, rows = context.bounds[1], context.bounds[1:]
    if tokens == context.tokens and len(rows) == 1:
        return x._replace(initial_state=None, cu_seqlens=None), None
    pieces = {  # one split, not two slices: backward is one concatenation
        name: t.split([tokens, context.tokens - tokens], dim=1)
        for name, t in x._asdict().items()
        if name in OF_TOKENS and t is not None
    }
    head = {name: piece[0] for name, piece in pieces.items()} | {"initial_state": None, "cu_seqlens": None}
    bounds = tuple(bound - tokens for bound in rows)
    rest = {name: piece[1] for name, piece in pieces.items()} | {
        "initial_state": None if x.initial_state is None else x.initial_state[1:],
        "cu_seqlens": context.place(bounds, x.q.device),
    }
    return x._replace(**head), (x._replace(**rest), bounds)


def _summarize(
    context: Part, run: LocalRun, head: Inputs | None, x: Inputs, last: Tensor | None
) -> tuple[Tensor, Response | None]:
    """The map [HV, K, K + V] of a state through this rank; ``last`` is the state of a sequence that begins here and
    continues. Where no sequence continues, nobody reads the map.
    """
    (HV, V), K = x.v.shape[2:], x.q.shape[-1]
    if last is not None:
        return F.pad(last, (K, 0)), None  # what comes in does not continue
    if not context.continues:
        dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
        return x.q.new_zeros(HV, K, K + V, dtype=dtype), None
    response = _respond(run, head)
    _, B = run(head._replace(initial_state=None), None)
    return torch.cat([response.Phi, B[0]], dim=-1), response


def _respond(run: LocalRun, head: Inputs) -> Response:
    """The run with v = 0 from the identity."""
    (_, T, HV), K = head.v.shape[:3], head.q.shape[-1]
    one = torch.eye(K, device=head.q.device).expand(1, HV, K, K).contiguous()
    r, Phi = run(head._replace(v=head.v.new_zeros(1, T, HV, K), initial_state=one), None)
    return Response(r, Phi[0])


# Compositions are in float64: they are small, and neither autocast nor a wish for TF32 reaches them.


def _compose(maps: Tensor) -> Tensor:
    """The state after consecutive maps [P, HV, K, K + V], in the first of which its sequence begins."""
    K = maps.shape[-2]
    S, *others = maps.double().unbind()
    S = S[..., K:]
    for one in others:
        S = one[..., :K] @ S + one[..., K:]
    return S.to(maps.dtype)


def _compose_back(Phi: Tensor, D: Tensor) -> Tensor:
    """The state's gradient before consecutive D [P, HV, K, V], in the last of which its sequence ends."""
    *others, dS = D.double().unbind()
    for one, transition in zip(reversed(others), Phi.double().flip(0), strict=True):
        dS = one + transition.mT @ dS
    return dS.to(D.dtype)


def _sum_of_products(r: Tensor, do: Tensor) -> Tensor:
    """``sum_t r_t do_t^T`` [HV, K, V] of r [T, HV, K] and do [T, HV, V], in at least float32."""
    r, do = r.permute(1, 2, 0), do.transpose(0, 1)
    if r.dtype in (torch.float64, torch.float32):
        return torch.bmm(r, do)
    if r.is_cuda:  # operands as they are, and no rounding of the sums
        return torch.bmm(r, do, out_dtype=torch.float32)
    return torch.bmm(r.float(), do.float())
