"""Tiny models with random weights, on disk: ``python tiny_models.py qwen3_next|kimi_linear FOLDER``."""

import sys

import torch
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

QWEN = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1, "initializer_range": 0.06, "eos_token_id": 1,
}  # fmt: skip


def qwen3_next() -> nn.Module:
    config = Qwen3NextConfig(**QWEN)
    config.architectures, config.dtype = ["Qwen3NextForCausalLM"], "bfloat16"
    return Qwen3NextForCausalLM(config)


MODELS = {"qwen3_next": qwen3_next}


def randomize(model: nn.Module) -> None:
    """Gates, convolutions and logits that are not nearly flat."""
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if parameter.endswith("A_log"):
                p.uniform_(-2, 1.0)
            if parameter.endswith("dt_bias"):
                p.uniform_(-3, 0)
            if "conv1d" in parameter:
                p.normal_(0, 0.4)
        model.get_output_embeddings().weight.mul_(4)  # or logits would be flat
        model.get_input_embeddings().weight.mul_(8)


def make(name: str, folder: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
