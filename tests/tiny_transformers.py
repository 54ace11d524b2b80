"""The smallest models of transformers with gated delta rule or KDA layers: real modelling code, random weights."""

from importlib import import_module
from importlib.util import find_spec

import torch

COMMON = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
GDN = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MOE = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
KDA = {"linear_head_dim": 8, "linear_num_heads": 2, **MLA}

# Per family: configuration class, model class, what the configuration needs beside the common sizes.
ALL = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", GDN | MOE),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GDN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", GDN | MOE),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        GDN
        | MOE
        | {
            "hc_count": 2,
            "hc_lowrank": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", GDN),
    "lara_mini": (
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        GDN
        | MOE
        | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        KDA | {"moe_intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        KDA
        | {
            "qk_rope_head_dim": 0,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "index_topk": 64,
            "index_kpool": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "hc_mult": 2,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        KDA
        | {
            "head_dim": 8,
            "moe_intermediate_size": 8,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_mtp_layers": 0,
        },
    ),
}
FAMILIES = {name: ALL[name] for name in ALL if find_spec(f"transformers.models.{name}")}  # of this transformers


def modelling(family):
    return import_module(f"transformers.models.{family}.modeling_{family}")


def build(family, dtype=torch.float32, **changes):
    config_name, model_name, sizes = FAMILIES[family]
    configuration = import_module(f"transformers.models.{family}.configuration_{family}")
    torch.manual_seed(0)
    config = getattr(configuration, config_name)(
        **COMMON | sizes | changes, attn_implementation="eager", experts_implementation="eager"
    )
    return getattr(modelling(family), model_name)(config).to(dtype).eval()
