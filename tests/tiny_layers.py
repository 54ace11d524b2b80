"""Small layers of every kind, for the tests that any of them must pass."""

import torch

from flash_delta.layers import (
    Attention,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    SimpleGatedLinearAttention,
)

D = 12
HEADS = {"hidden_size": D, "head_dim": 4, "num_heads": 2}
DELTA_LAYERS = {
    "gdn": lambda: GatedDeltaNet(**HEADS),
    "gdn-grouped": lambda: GatedDeltaNet(**HEADS, num_v_heads=4, conv_bias=True, allow_neg_eigval=True),
    "gdn-bare": lambda: GatedDeltaNet(**HEADS, use_gate=False, use_short_conv=False),
    "gdn-stepped": lambda: GatedDeltaNet(**HEADS, mode="fused_recurrent"),
    "kda": lambda: KimiDeltaAttention(**HEADS),
    "kda-bounded": lambda: KimiDeltaAttention(**HEADS, num_v_heads=4, expand_v=2, lower_bound=-5.0, safe_gate=True),
    "gdn2": lambda: GatedDeltaNet2(**HEADS),
    "gdn2-grouped": lambda: GatedDeltaNet2(**HEADS, num_v_heads=4, expand_v=2, conv_bias=True, allow_neg_eigval=True),
    "gdn2-guarded": lambda: GatedDeltaNet2(**HEADS, num_v_heads=4, allow_neg_eigval=True, guard=True),
    "gdp": lambda: GatedDeltaProduct(**HEADS),
    "gdp-grouped": lambda: GatedDeltaProduct(
        **HEADS, num_v_heads=4, conv_bias=True, allow_neg_eigval=False, num_householder=3
    ),
    "gdp-bare": lambda: GatedDeltaProduct(
        **HEADS, use_output_gate=False, use_short_conv=False, use_forget_gate=False, mode="fused_recurrent"
    ),
    "delta": lambda: DeltaNet(hidden_size=D, num_heads=2),
    "delta-bare": lambda: DeltaNet(
        "fused_recurrent",
        hidden_size=D,
        expand_k=2 / 3,
        expand_v=2,
        num_heads=2,
        use_beta=False,
        use_gate=True,
        use_short_conv=False,
        allow_neg_eigval=True,
        qk_activation="elu",
        qk_norm="sum",
    ),
    "comba": lambda: Comba(**HEADS),
    "comba-grouped": lambda: Comba(
        **HEADS, num_v_heads=4, conv_bias=True, use_output_gate=False, use_inner_decay=False, correction_factor=0.02
    ),
    "gla": lambda: SimpleGatedLinearAttention(hidden_size=D, num_heads=2),
    "gla-grouped": lambda: SimpleGatedLinearAttention(
        hidden_size=D, num_heads=4, num_kv_heads=2, feature_map="sqrelu", conv_bias=True, gate_fn="gelu"
    ),
}
LAYERS = {**DELTA_LAYERS, "attention": lambda: Attention(hidden_size=D, num_heads=4, num_kv_heads=2, head_dim=6)}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
