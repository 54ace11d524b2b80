"""Small language models of every kind, and tokens for them."""

import torch

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 1,
    "num_v_heads": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
KINDS = {
    "gdn": {"mixer": "gdn"},
    "kda": {"mixer": "kda", "lower_bound": -5.0},
    "gdn2": {"mixer": "gdn2", "allow_neg_eigval": True},
    "gdp": {"mixer": "gdp", "num_householder": 3, "allow_neg_eigval": True},
    "ungated": {"mixers": ["delta_net", "gdp", "delta_net"], "use_forget_gate": False},
    "hybrid": {"mixers": ["gdn", "attention", "kda"]},
}


def build(kind):
    torch.manual_seed(0)
    return FlashDeltaForCausalLM(FlashDeltaConfig(**SIZES, **KINDS[kind])).double().eval()


def tokens(*shape, seed=0):
    return torch.randint(1, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
