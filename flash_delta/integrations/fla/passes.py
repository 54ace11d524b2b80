"""The two passes of fla.ops.gated_delta_rule.chunk, without autograd."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_delta.integrations.fla.calls import chunk_gated_delta_rule
from flash_delta.ops._check.rule import refuse_unless_none
from flash_delta.ops._function import Inputs, gradients

WHOLE_CALLS = "chunk_gated_delta_rule takes it"


@torch.no_grad()
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: None = None,
    chunk_indices: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The forward pass without autograd: ``(g, o, A, final_state, initial_state, g_input)``.

    ``g`` and ``A`` are only for :func:`chunk_gated_delta_rule_bwd`, and differ from fla's. ``g`` is a copy of the
    argument and not sums of it. ``A [B, T, HV, chunk_size]`` is NaN, because nothing is saved for the backward pass.
    So fla's own backward pass would return NaN, and not gradients of something else.
    """
    refuse_unless_none("chunk_gated_delta_rule_fwd", "cp_context", cp_context, WHOLE_CALLS)
    o, final_state = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
    )
    kept = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
    A = k.new_full((*v.shape[:3], chunk_size), math.nan)
    return kept, o, A, final_state, initial_state, g if use_gate_in_kernel else None


@torch.no_grad()
def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: None = None,
    chunk_indices: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    g_input: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor | None, ...]:
    """``(dq, dk, dv, dbeta, dg, dinitial_state, dA_log, ddt_bias)``, each in the dtype of its tensor.

    ``g`` and ``A`` are results of :func:`chunk_gated_delta_rule_fwd`, or of fla's function of this name. ``A`` only
    tells which of the two it was, and is computed again.
    """
    op = "chunk_gated_delta_rule_bwd"
    refuse_unless_none(op, "cp_context", cp_context, WHOLE_CALLS)
    of_gate = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
    g = g_input if use_gate_in_kernel else g.where(A[..., 0].isnan(), _log_decays(g, cu_seqlens, chunk_size))
    options = {
        "op": op,
        "gate": ("scalar", use_gate_in_kernel, None),
        "erase": "decayed",
        "scale": scale,
        "chunk_size": chunk_size,
        "state_v_first": state_v_first,
    }
    d = gradients(Inputs(q, k, v, g, beta, None, initial_state, *of_gate, cu_seqlens), options, do, dht)
    return d.q, d.k, d.v, d.beta, d.g, d.initial_state, d.A_log, d.dt_bias


def _log_decays(sums: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """The log decays of which fla's forward pass returned sums [B, T, HV]: within chunks, in units of ln 2."""
    token = torch.arange(sums.shape[1], device=sums.device)
    if cu_seqlens is not None:  # a token's place in its sequence
        token = token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]
    before = F.pad(sums, (0, 0, 1, -1)).masked_fill((token % chunk_size == 0)[:, None], 0)
    return (sums - before) * math.log(2)
