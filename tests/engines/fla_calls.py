"""Calls of fla's functions by name: the function, its tensors, and whether fla has their gradients."""

from functools import partial

import torch
from torch.nn import functional as F

B, T, H, HV, K, V = 2, 70, 2, 4, 16, 16
PLAIN = {"output_final_state": True, "scale": 0.3}
RAW = {
    **PLAIN,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


def rules():
    """Raw inputs, as layers have them; and those that are activated already, with one head for each."""
    from fla import ops

    q, k = torch.randn(2, B, T, H, K)
    v, beta, state = torch.randn(B, T, HV, V), torch.randn(B, T, HV), torch.randn(B, HV, V, K)
    raw = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": state, "A_log": torch.randn(HV)}
    gdn = {**raw, "g": torch.randn(B, T, HV), "dt_bias": torch.randn(HV)}
    kda = {**raw, "g": torch.randn(B, T, HV, K), "dt_bias": torch.randn(HV * K)}
    few = {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": torch.randn(B, T, H, V),
        "beta": torch.rand(B, T, H),
        "initial_state": torch.randn(B, H, K, V),
    }
    decay = {"g": -torch.rand(B, T, H)}
    half = {name: t if name == "initial_state" else t.bfloat16() for name, t in few.items()}
    gla = {name: t for name, t in few.items() if name != "beta"}
    return {
        "gdn": (partial(ops.chunk_gated_delta_rule, **RAW), gdn, True),
        "kda": (partial(ops.chunk_kda, **RAW), kda, True),
        "kda, bounded": (partial(ops.chunk_kda, **RAW, safe_gate=True, lower_bound=-4.0), kda, True),
        "kda, activated": (partial(ops.chunk_kda, **PLAIN), {**few, "g": -torch.rand(B, T, H, K)}, True),
        "gdn, activated": (partial(ops.chunk_gated_delta_rule, **PLAIN), few | decay, True),
        "comba": (partial(ops.chunk_comba, **PLAIN), {**few, **decay, "p": 0.5 * few["k"]}, True),
        "gla": (partial(ops.chunk_simple_gla, **PLAIN), gla | decay, True),
        "delta": (partial(ops.chunk_delta_rule, **PLAIN), half, True),
        "recurrent gdn": (partial(ops.fused_recurrent_gated_delta_rule, **RAW), gdn, False),
        "recurrent kda": (partial(ops.fused_recurrent_kda, **RAW), kda, False),
        "recurrent delta": (partial(ops.fused_recurrent_delta_rule, **PLAIN), few, True),
    }


def around():
    """Gates, the short convolution, norms."""
    from fla.modules import FusedRMSNormGated, RMSNorm
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate
    from fla.ops.kda.gate import fused_kda_gate

    def convolve(**tensors):
        """Without the state's oldest input, which no convolution reads: fla drops its gradient."""
        y, state = causal_conv1d(**tensors, activation="silu", output_final_state=True)
        return y, state[..., 1:]

    gdn = {"g": torch.randn(B, T, HV), "A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    kda = {"g": torch.randn(B, T, HV, K), "A_log": torch.randn(HV), "dt_bias": torch.randn(HV * K)}
    x, taps, bounds = torch.randn(1, T, 12), torch.randn(12, 4), torch.tensor([0, 33, T])
    row = {"x": x, "weight": taps, "bias": torch.randn(12), "residual": torch.randn(1, T, 12)}
    norms = {"x": torch.randn(B, T, HV, V)}
    return {
        "gdn gate": (one(fused_gdn_gate), gdn, True),
        "kda gate": (one(fused_kda_gate), kda, True),
        "bounded gate": (one(partial(fused_kda_gate, lower_bound=-5.0)), kda, True),
        "convolution": (convolve, {**row, "initial_state": torch.randn(2, 12, 4), "cu_seqlens": bounds}, True),
        "norm": (one(RMSNorm(V)), norms, True),
        "l2norm": (one(l2norm), norms, True),
        "gated norm": (one(FusedRMSNormGated(V, activation="sigmoid")), {**norms, "g": torch.randn(B, T, HV, V)}, True),
    }


def one(function):
    return lambda **tensors: (function(**tensors),)


def with_gradients(function, **tensors):
    """Results, and gradients of all tensors that may have one."""
    given = {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    found = [t for t in function(**given) if t is not None]
    torch.manual_seed(1)
    sum((t.float() * torch.randn(t.shape)).sum() for t in found).backward()
    return [*found, *(t.grad for t in given.values() if t.requires_grad)]
