"""Stage ``scores``: the products between tokens of one chunk, and their gradients.

    P_ij = q_i . e^{G_i - G_j} k_j   i >= j          L_ij = p_i . e^{H_i - G_j} k_j   i > j

G is the cumulative log decay in the chunk, H the gate at which the erase key reads (`docs/mathematics.md` section 1).
This is the one stage in which the scalar gate and the gate per channel differ.

Shapes: q, k, p ``[M, H, 1, C, K]`` (with a gate per channel p may have r rows), G, H ``[M, H, r, C, 1 or K]`` with
r = HV / H value heads per key head, P, L ``[M, H, r, C, C]``. G is float64, because a difference of two cumulative
gates must resolve the gate of one mild token after many strong ones. In float32 it resolves only 5e-4 (G = -6400 after
64 tokens of -100 nats).

A pair (i, j) contains the gates of the tokens j + 1 .. i. The gradient of a gate is summed only over the pairs that
contain it. There is a shorter form: q.dq - k.dk, summed from the chunk's end. It adds the other pairs twice, with
both signs. They cancel except for their rounding. In float32 that costs digits of dA_log where gates are strong.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScoreGradients(NamedTuple):
    dq: Tensor  # [M, H, C, K]
    dk: Tensor  # [M, H, C, K], of the key that is written: the columns of P and L
    dp: Tensor | None  # that of p: [M, H, 1 or r, C, K], of the key that erases: the rows of L
    dg: Tensor | None  # [M, H, r, C, 1 or K], of the log decay itself


def scores(q: Tensor, k: Tensor, p: Tensor | None, G: Tensor | None, H: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``(P, L)``; L is None without erase keys. G None: no gate."""
    if G is not None and G.shape[-1] > 1:
        return _channel_scores(q, k, p, G)
    P = q @ k.mT
    L = None if p is None else p @ k.mT
    if G is None:
        return P.tril_(), None if L is None else L.tril_(-1)
    decay = _pair_decay(G, G, q.dtype)
    P = P * decay
    if L is not None:
        L = (L * (decay if H is G else _pair_decay(H, G, q.dtype, -1))).tril_(-1)
    return P, L


def _pair_decay(rows: Tensor, columns: Tensor, dtype: torch.dtype, diagonal: int = 0) -> Tensor:
    """``e^{rows_i - columns_j}`` for i >= j (i > j with diagonal -1), else 0; ``[M, H, r, C, C]``."""
    difference = (rows - columns.mT).to(dtype)  # above the diagonal, exp of it would overflow
    return difference.tril_(diagonal).exp_().tril_(diagonal)


def scores_backward(
    dP: Tensor, dL: Tensor | None, P: Tensor, L: Tensor | None,
    q: Tensor, k: Tensor, p: Tensor | None, G: Tensor | None, H: Tensor | None,
) -> ScoreGradients:  # fmt: skip
    """Gradients from ``dP`` (lower) and ``dL`` (strictly lower), both ``[M, H, r, C, C]``."""
    if G is not None and G.shape[-1] > 1:
        return _channel_scores_backward(dP, dL, q, k, p, G)
    dg = None
    if G is not None:
        decay = _pair_decay(G, G, q.dtype)
        carried = dP * P
        dP = dP * decay
        if dL is not None:
            pairs = dL * L
            if H is not G:  # row i of L contains the gates of j + 1 .. i - 1
                pairs = F.pad(pairs[..., 1:, :], (0, 0, 0, 1))
                decay = _pair_decay(H, G, q.dtype, -1)
            carried += pairs
            dL = dL * decay
        dg = _gates_of_pairs(carried)
    q, k, p = q.squeeze(2), k.squeeze(2), None if p is None else p.squeeze(2)
    dP = dP.sum(2)  # value heads of one key head share q and k, so sum first and then multiply
    dq, dk = dP @ k, dP.mT @ q
    if dL is None:
        return ScoreGradients(dq, dk, None, dg)
    dL = dL.sum(2)
    return ScoreGradients(dq, dk + dL.mT @ p, (dL @ k).unsqueeze(2), dg)


def total(*terms: Tensor) -> Tensor:
    """``dg``, of four. They may cancel, but their rounding errors do not, so ``testing`` asks how large they are."""
    return sum(terms)


def _gates_of_pairs(pairs: Tensor) -> Tensor:
    """``dg_t``, the sum over all j < t <= i of ``pairs [.., C, C]``: ``[.., C, 1]``."""
    C = pairs.shape[-1]
    at_least_t = pairs.new_ones(C, C).triu_()
    return (at_least_t @ pairs).tril_(-1).sum(-1, keepdim=True)


# A gate per channel does not factor out of the product. So the chunk is halved again and again. Take the rows of a
# right half and the columns of its left half, and let r be G at the left half's last token. For any gate, both factors
# of e^{G_i - r} e^{r - G_j} are then at most 1. No clamp is needed, and r never comes after its rows [K1-K3].


def _halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Left and right halves of every block of 2 s tokens: ``[..., C, K]`` to two of ``[..., C / 2s, s, K]``."""
    return x.unflatten(-2, (-1, 2, s)).unbind(-3)


def corner(x: Tensor, s: int, row: int, column: int) -> Tensor:
    """View of one quarter of every diagonal block of 2 s tokens: ``[..., C, C]`` to ``[..., C / 2s, s, s]``.

    ``row`` and ``column`` choose the quarter: 0 is the first half, 1 the second.
    """
    blocks = x.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))  # [..., row block, 2, s, column block, 2, s]
    return blocks.select(-5, row).select(-2, column).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _levels(G: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Per level of halving: the half's size s, the row factors e^{G_i - r} and the column factors e^{r - G_j}."""
    s = G.shape[-2] // 2
    while s >= 1:
        left, right = _halves(G, s)
        r = left[..., -1:, :]
        yield s, (right - r).to(dtype).exp_(), (r - left).to(dtype).exp_()
        s //= 2


def _channel_scores(q: Tensor, k: Tensor, p: Tensor | None, G: Tensor) -> tuple[Tensor, Tensor | None]:
    C = G.shape[-2]
    P = q.new_zeros(*G.shape[:3], C, C)
    L = None if p is None else torch.zeros_like(P)
    P.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for s, row, column in _levels(G, q.dtype):
        columns = (_halves(k, s)[0] * column).mT
        corner(P, s, 1, 0).copy_((_halves(q, s)[1] * row) @ columns)
        if L is not None:
            corner(L, s, 1, 0).copy_((_halves(p, s)[1] * row) @ columns)
    return P, L


def _channel_scores_backward(
    dP: Tensor, dL: Tensor | None, q: Tensor, k: Tensor, p: Tensor | None, G: Tensor
) -> ScoreGradients:
    dq, dk, dg = (q.new_zeros(G.shape) for _ in range(3))
    dp = None if dL is None else torch.zeros_like(dk)
    for s, row, column in _levels(G, q.dtype):
        left_k, left_dk, left_dg = (_halves(x, s)[0] for x in (k, dk, dg))
        columns, back, carried = left_k * column, torch.zeros_like(left_dk), torch.zeros_like(left_dk)
        for pairs, x, dx in ((dP, q, dq), (dL, p, dp)):
            if pairs is None:
                continue
            square, right_x = corner(pairs, s, 1, 0), _halves(x, s)[1]
            rows = (square @ columns).mul_(row)
            _halves(dx, s)[1].add_(rows)
            carried.addcmul_(rows, right_x)
            back += square.mT @ (right_x * row)
        back *= column
        left_dk += back
        # rows contain the gates from the half's start to their own, columns those after their own
        _halves(dg, s)[1].add_(carried.flip(-2).cumsum(-2).flip(-2))
        left_dg[..., 1:, :].add_((back * left_k).cumsum(-2)[..., :-1, :])
    diagonal = dP.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk = (dq + diagonal * k).sum(2), (dk + diagonal * q).sum(2)
    return ScoreGradients(dq, dk, None if dp is None else dp.sum_to_size(p.shape), dg)
