"""One block of a FlashDelta model: x + mixer(norm(x)), then x + mlp(norm(x)). The configuration names the mixer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from flash_delta.layers import (
    Attention,
    AttentionState,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    MixerState,
)
from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.modules import RMSNorm
from flash_delta.parallel import ContextParallel


def build_mixer(config: FlashDeltaConfig, layer_idx: int) -> nn.Module:
    """The token mixer that `config.mixers` names for this layer."""
    name = config.mixers[layer_idx]
    if name == "attention":
        return Attention(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.attention_head_dim,
            rope_theta=config.rope_theta,
            layer_idx=layer_idx,
        )
    shared = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "allow_neg_eigval": config.allow_neg_eigval,
        "conv_size": config.conv_size,
        "layer_idx": layer_idx,
        "norm_eps": config.norm_eps,
        "backend": config.backend,
    }
    if name == "delta_net":
        expand_k = config.num_heads * config.head_dim / config.hidden_size
        return DeltaNet(**shared, expand_k=expand_k, expand_v=expand_k * config.expand_v)
    shared |= {"head_dim": config.head_dim, "expand_v": config.expand_v, "num_v_heads": config.num_v_heads}
    if name == "gdp":
        options = {"num_householder": config.num_householder, "use_forget_gate": config.use_forget_gate}
        return GatedDeltaProduct(**shared, **options)
    if name != "kda":
        return {"gdn": GatedDeltaNet, "gdn2": GatedDeltaNet2}[name](**shared)
    # Log decays of a bounded gate are never below the bound, so safe_gate's promise holds.
    return KimiDeltaAttention(**shared, lower_bound=config.lower_bound, safe_gate=config.lower_bound is not None)


class SwiGLU(nn.Module):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)) (arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FlashDeltaBlock(GradientCheckpointingLayer):
    """h = x + mixer(norm(x)), y = h + mlp(norm(h))."""

    def __init__(self, config: FlashDeltaConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.mixer = build_mixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        state: MixerState | AttentionState | None,
        cu_seqlens: Tensor | None,
        cp_context: ContextParallel | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        mixed = self.mixer(self.mixer_norm(hidden_states), attention_mask, state, cu_seqlens, cp_context, position_ids)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))
