"""The stages of the chunkwise algorithm, forward and backward, on one segment of chunks.

The results of a chunk of C tokens are linear in the state S0 at its start and in its values V. With the decayed copies

    Eg = p . e^H      Qg = q . e^G      Kd = k . e^{G_C - G}      gamma = e^{G_C}

the stages are

    cumulate   G_i = g_1 + .. + g_i;  H = G, or G_{i-1} where the erase reads the undecayed state (Comba)
    scores     P_ij = q_i . e^{G_i - G_j} k_j  (i >= j)      L_ij = p_i . e^{H_i - G_j} k_j  (i > j)
    solve      A = (I + diag(b) L)^{-1};   X = A^T Kd;   Y = P A
    scan       R = V - Eg S0;              S1 = gamma . S0 + X^T (b . R)              chunk after chunk
    output     O = scale (Qg S0 + Y (b . R))

Only two products of the scan depend on the chunk before. Backward, right to left, with U = A (b . R) and a scaled dO:

    scan       dU~ = X dS1 + Y^T dO;   dV = b . dU~;   dS0 = gamma . dS1 + Qg^T dO - Eg^T dV
    scores     dP = tril(dO U^T);      dL = -tril(dV U^T, -1)            the gradient of the inverse needs no inverse
    strength   db = <dU~, R - L U>

b multiplies R and is no part of A. So db needs no division by b, and b = 0 is exact. Without the delta rule (simple
GLA) A = I, Eg = 0, b = 1. In GDN-2 b = 1, p is b . k and V is w . V. `docs/mathematics.md` proves each line.

All tensors are ``[M, H, r, C, .]``: M chunks, r = HV / H value heads per key head. Tensors of key heads have r = 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_delta.reference.layout import Segment
from flash_delta.reference.scores import corner, scores, scores_backward, total

SUBSTITUTED = 16  # tokens of a block that `solve` inverts by substitution


class Tokens(NamedTuple):
    """One segment's inputs after activations, chunks first."""

    q: Tensor  # [M, H, 1, C, K]
    k: Tensor  # [M, H, 1, C, K]
    v: Tensor  # [M, H, r, C, V]
    p: Tensor | None  # [M, H, 1 or r, C, K]; None: nothing is erased
    b: Tensor | None  # [M, H, r, C, 1]; None: 1
    G: Tensor | None  # [M, H, r, C, 1 or K], float64; None: no gate
    H: Tensor | None  # the same shape
    norms: tuple[Tensor, ...]  # 1 / |q|, 1 / |k| (and 1 / |p|), [M, H, 1, C, 1]; empty without l2norm
    gated: tuple[Tensor, Tensor, Tensor] | None = None  # b [M, H, r, C, K], w, v [M, H, r, C, V] if p is b . k, v w . v


class Factors(NamedTuple):
    """The factors of a segment's chunks. They do not depend on the state."""

    P: Tensor  # [M, H, r, C, C]
    L: Tensor | None  # [M, H, r, C, C]
    A: Tensor | None  # [M, H, r, C, C]
    X: Tensor  # [M, H, r, C, K]
    Y: Tensor  # [M, H, r, C, C]
    Eg: Tensor | None  # [M, H, r, C, K]
    Qg: Tensor  # [M, H, r, C, K]
    Kd: Tensor  # [M, H, r, C, K]
    gamma: Tensor | None  # [M, H, r, 1 or K, 1]


def shift(x: Tensor) -> Tensor:
    """Gives every token the row of the token before it in its chunk. The first token gets zeros."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


class Decays(NamedTuple):
    """``[M, H, r, C, 1 or K]``, in the dtype of the tokens."""

    G: Tensor  # e^G
    H: Tensor  # e^H
    R: Tensor  # e^{G_C - G}


def decays(t: Tokens) -> Decays:
    dtype = t.q.dtype
    eG = t.G.to(dtype).exp()
    eH = eG if t.H is t.G else t.H.to(dtype).exp()
    return Decays(eG, eH, (t.G[..., -1:, :] - t.G).to(dtype).exp())


def factor(t: Tokens, A: Tensor | None = None, fold: bool = False) -> Factors:
    """Stages ``scores`` and ``solve``, and the decayed copies. ``A`` is given if it was saved.

    ``fold`` multiplies X and Y by b, which is cheapest in the forward pass. R must then not be multiplied by b.
    """
    Eg, Qg, Kd, gamma = t.p, t.q, t.k, None
    if t.G is not None:
        e = decays(t)
        Qg, Kd, gamma = t.q * e.G, t.k * e.R, e.G[..., -1:, :].mT
        Eg = None if t.p is None else t.p * e.H
    P, L = scores(t.q, t.k, t.p, t.G, t.H)
    X, Y = Kd, P
    if L is not None:
        A = solve(L, t.b) if A is None else A
        W = A * t.b.mT if fold and t.b is not None else A
        X, Y = W.mT @ Kd, P @ W
    P, X, Y, Eg, Qg, Kd = (None if x is None else per_value_head(x, t) for x in (P, X, Y, Eg, Qg, Kd))
    return Factors(P, L, A, X, Y, Eg, Qg, Kd, gamma)


def per_value_head(x: Tensor, t: Tokens) -> Tensor:
    """``[M, H, 1 or r, ., .]`` to ``[M, H, r, ., .]``, a view. Without gate and strength more tensors have r = 1."""
    return x.expand(*t.v.shape[:3], -1, -1)


def solve(L: Tensor, b: Tensor | None) -> Tensor:
    """``A = (I + N)^{-1}`` with N = diag(b) L, strictly lower.

    Substitution, which is slow, inverts diagonal blocks of 16 tokens. Then products join pairs of blocks [I2]:
    ``[[A1, 0], [-A2 N21 A1, A2]]``.
    """
    N = L if b is None else b * L
    A, s = torch.zeros_like(N), min(SUBSTITUTED, N.shape[-1])
    eye = torch.eye(s, dtype=N.dtype, device=N.device)
    blocks = diagonal_blocks(N, s)
    inverse = torch.linalg.solve_triangular(blocks, eye.expand_as(blocks), upper=False, unitriangular=True)
    diagonal_blocks(A, s).copy_(inverse)
    while s < N.shape[-1]:
        first, second = corner(A, s, 0, 0), corner(A, s, 1, 1)
        corner(A, s, 1, 0).copy_(second @ (corner(N, s, 1, 0) @ first)).neg_()
        s *= 2
    return A


def diagonal_blocks(x: Tensor, s: int) -> Tensor:
    """View of the s x s blocks on the diagonal: ``[..., C, C]`` to ``[..., C / s, s, s]``."""
    return x.unflatten(-1, (-1, s)).unflatten(-3, (-1, s)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def flat(x: Tensor) -> Tensor:
    """``[M, H, r, ., .]`` to a batch of matrices for torch's fused products."""
    return x.flatten(0, 2)


def times(b: Tensor | None, x: Tensor) -> Tensor:
    return x if b is None else b * x


def scan(t: Tokens, f: Factors, segment: Segment, S: Tensor, R: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Moves the state from chunk to chunk. ``S [N, H, r, K, V]`` is advanced in place.

    Yields the chunks of every position with the states at their start, as a view that is valid until the next position.
    Fills these chunks of ``R = V - Eg S0 [M, H, r, C, V]``. (R is V itself if nothing is erased.)
    """
    X = times(t.b, f.X)
    for step in segment.steps:
        live = S[: step.stop - step.start]
        if f.Eg is not None:
            torch.baddbmm(flat(t.v[step]), flat(f.Eg[step]), flat(live), alpha=-1, out=flat(R[step]))
        yield step, live
        if f.gamma is not None:
            live *= f.gamma[step]
        flat(live).baddbmm_(flat(X[step].mT), flat(R[step]))


def new_residual(t: Tokens) -> Tensor:
    """A new R, which ``scan`` fills."""
    return t.v if t.p is None else torch.empty_like(t.v)


def chunk_states(t: Tokens, f: Factors, segment: Segment, S: Tensor) -> tuple[Tensor, Tensor]:
    """``S0``, the state at every chunk's start ``[M, H, r, K, V]``, and ``R``. ``S`` is advanced in place."""
    S0, R = S.new_empty(segment.size, *S.shape[1:]), new_residual(t)
    for step, live in scan(t, f, segment, S, R):
        S0[step] = live
    return S0, R


class TokenGradients(NamedTuple):
    """Gradients of the activated tokens, per key head or per value head, and of the log decay in ``dg``."""

    dq: Tensor  # [M, H, C, K]
    dk: Tensor  # [M, H, C, K]
    dp: Tensor | None  # that of p: [M, H, 1 or r, C, K]
    dv: Tensor  # [M, H, r, C, V]
    dg: Tensor | None  # [M, H, r, C, 1 or K]
    db: Tensor | None  # [M, H, r, C, 1]


def scan_backward(t: Tokens, f: Factors, segment: Segment, dO: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the state's gradient from chunk to chunk, right to left. ``dS [N, H, r, K, V]`` is advanced in place.

    Returns dS1, the gradient of the state at every chunk's end ``[M, H, r, K, V]``, and ``dU~  [M, H, r, C, V]``.
    """
    dU = f.Y.mT @ dO
    dS0 = f.Qg.mT @ dO
    Eg = None if f.Eg is None else times(t.b, f.Eg)
    dS1 = torch.empty_like(dS0)
    for step in reversed(segment.steps):
        live = dS[: step.stop - step.start]
        dS1[step] = live
        dU[step] += f.X[step] @ live
        if f.gamma is not None:
            live *= f.gamma[step]
        live += dS0[step]
        if Eg is not None:
            flat(live).baddbmm_(flat(Eg[step].mT), flat(dU[step]), alpha=-1)
    return dS1, dU


def gradients(t: Tokens, f: Factors, S0: Tensor, R: Tensor, dO: Tensor, dS1: Tensor, dU: Tensor) -> TokenGradients:
    """The gradients of the tokens of all chunks at once. ``dO`` is already multiplied by the scale."""
    U = times(t.b, R)
    U = U if f.A is None else f.A @ U
    dV = times(t.b, dU)
    dP = (dO @ U.mT).tril_()
    dL = None if f.L is None else (dV @ U.mT).tril_(-1).neg_()
    pairs = scores_backward(dP, dL, f.P, f.L, t.q, t.k, t.p, t.G, t.H)
    dQg, dKd = dO @ S0.mT, U @ dS1.mT
    dEg = None if f.Eg is None else -(dV @ S0.mT)
    dg = None
    if t.G is not None:
        dg = gate_gradient(t, f, pairs.dg, dQg, dEg, dKd, (S0 * dS1).sum(-1).unsqueeze(-2))
        e = decays(t)
        dQg, dKd = dQg * e.G, dKd * e.R
        dEg = None if dEg is None else dEg * e.H
    db = None
    if t.b is not None:
        Z = R if f.L is None else R - f.L @ U
        db = (dU * Z).sum(-1, keepdim=True)
    dp = None if dEg is None else pairs.dp + dEg.sum_to_size(t.p.shape)
    return TokenGradients(pairs.dq + dQg.sum(2), pairs.dk + dKd.sum(2), dp, dV, dg, db)


def gate_gradient(
    t: Tokens, f: Factors, pairs: Tensor, dQg: Tensor, dEg: Tensor | None, dKd: Tensor, S0_dS1: Tensor
) -> Tensor:
    """``dg``, from the scores (``pairs``) and every decayed quantity.

    A row of Qg contains the gates up to its own, a row of Kd those after it, and gamma all gates. Each sum runs only
    over the rows that contain gate t, so that no large terms cancel. ``S0_dS1`` is ``[M, H, r, 1, K]``.
    """

    def reduce(x: Tensor) -> Tensor:
        return x if t.G.shape[-1] > 1 else x.sum(-1, keepdim=True)

    rows = reduce(f.Qg * dQg)
    if dEg is not None:
        erased = reduce(f.Eg * dEg)
        rows += erased if t.H is t.G else F.pad(erased[..., 1:, :], (0, 0, 0, 1))  # Eg carries the gates before its own
    ahead = rows.flip(-2).cumsum(-2).flip(-2)
    behind = shift(reduce(f.Kd * dKd).cumsum(-2))
    return total(pairs, ahead, behind, f.gamma.mT * reduce(S0_dS1))
