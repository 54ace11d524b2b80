"""The definition of the gated delta rule and its family, token by token.

    S~_t = e^{g_t} S_{t-1}
    S_t  = S~_t + beta_t k_t (v_t - E_t^T p_t)^T
    o_t  = scale * S_t^T q_t

============  ===========  ==================  =============================================
member        gate g       erase reads E_t     source
============  ===========  ==================  =============================================
GDN           scalar       S~_t, p = k         Yang et al., arXiv:2412.06464
KDA           per channel  S~_t, p = k         Kimi Team, arXiv:2510.26692
delta rule    none         S~_t, p = k         Yang et al., arXiv:2406.06484
Comba         scalar       S_{t-1}, own p      Hu et al., arXiv:2506.02475
simple GLA    scalar       nothing             Yang et al., arXiv:2312.06635, one decay per head
GDN-2         per channel  S~_t, p = b . k     fla 0.6.0, `fla.ops.gdn2`; v is w . v, beta is 1
============  ===========  ==================  =============================================

Everything else in the library is compared with this file in float64. Autograd differentiates it. It is written to be
easy to check by reading, and not to be fast.
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    *,
    scale: float | None = None,
    erase: Literal["decayed", "undecayed"] | None = "decayed",
    initial_state: Tensor | None = None,
    cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over every sequence, in the dtype of ``q``.

    Args:
        q, k: queries and write keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; value head ``h`` uses key head ``h // (HV // H)``.
        g: log decay in nats, ``[B, T, HV]`` or ``[B, T, HV, K]``; None: no decay.
        beta: write strength ``[B, T, HV]``; None: 1.
        p: erase keys ``[B, T, H or HV, K]``; None: k.
        scale: factor on the output; None: ``K ** -0.5``.
        erase: the state that the delta rule reads: ``"decayed"`` S~_t or ``"undecayed"`` S_{t-1}; None: no delta rule.
        initial_state: ``[N, HV, K, V]``; None: zeros.
        cu_seqlens: with B = 1, the N + 1 bounds of the packed sequences. Tokens after the last bound are zeros in
            ``o``.

    Returns:
        ``(o [B, T, HV, V], final_state [N, HV, K, V])``. An empty sequence returns its initial state.
    """
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, p = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k, k if p is None else p))
    beta = v.new_ones(B, T, HV) if beta is None else beta
    g = v.new_zeros(B, T, HV) if g is None else g
    g = g if g.dim() == 4 else g.unsqueeze(-1)  # [B, T, HV, K or 1]
    # Queries, erase keys and values are rows of matrices [1, K or V]; decays and write keys are columns [K, 1].
    q, p, v = ((scale * q).unsqueeze(-2), p.unsqueeze(-2), v.unsqueeze(-2))
    decay, k = (g.exp().unsqueeze(-1), (beta.unsqueeze(-1) * k).unsqueeze(-1))
    tokens = list(zip(*(x.unbind(1) for x in (q, k, v, decay, p)), strict=True))
    bounds = [0, T] if cu_seqlens is None else cu_seqlens
    state = v.new_zeros(B if cu_seqlens is None else len(bounds) - 1, HV, K, V)
    state = state if initial_state is None else initial_state

    o, final_states = [], []
    for n, (start, end) in enumerate(pairwise(bounds)):
        S = state if cu_seqlens is None else state[n : n + 1]  # [B or 1, HV, K, V]
        for q_t, k_t, v_t, decay_t, p_t in tokens[start:end]:
            decayed = decay_t * S
            u = v_t  # [B or 1, HV, 1, V], what the token writes
            if erase is not None:
                u = u - p_t @ (decayed if erase == "decayed" else S)
            S = decayed + k_t * u
            o.append(q_t @ S)
        final_states.append(S)
    o += [v.new_zeros(B, HV, 1, V)] * (T - len(o))  # after the last sequence
    return (
        torch.stack(o, dim=1).squeeze(-2) if o else v.new_zeros(B, T, HV, V),
        torch.cat(final_states) if final_states else state,
    )
