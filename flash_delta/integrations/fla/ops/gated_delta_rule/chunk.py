"""fla.ops.gated_delta_rule.chunk."""

import torch
from torch import Tensor

from flash_delta.ops import chunk_gated_delta_rule
from flash_delta.ops._check.rule import refuse_unless_none
from flash_delta.ops._function import Inputs, gradients

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "chunk_gated_delta_rule_fwd", "chunk_gdn"]

WHOLE_CALLS = "chunk_gated_delta_rule takes it"

chunk_gdn = chunk_gated_delta_rule


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
    argument and not sums of it. ``A [B, T, HV, chunk_size]`` is zeros, because nothing is saved for the backward pass.
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
    A = k.new_zeros(*v.shape[:3], chunk_size)
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

    ``g`` is the result of :func:`chunk_gated_delta_rule_fwd`. ``A`` is not read, because it is computed again.
    """
    op = "chunk_gated_delta_rule_bwd"
    refuse_unless_none(op, "cp_context", cp_context, WHOLE_CALLS)
    gate = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
    g = g_input if use_gate_in_kernel else g
    options = {
        "op": op,
        "gate": "scalar",
        "erase": "decayed",
        "scale": scale,
        "chunk_size": chunk_size,
        "raw_gate": use_gate_in_kernel,
        "state_v_first": state_v_first,
    }
    d = gradients(Inputs(q, k, v, g, beta, None, initial_state, *gate, cu_seqlens), options, do, dht)
    return d.q, d.k, d.v, d.beta, d.g, d.initial_state, d.A_log, d.dt_bias
