"""Tiny models with random weights, on disk: ``python tiny_models.py qwen3_next|qwen3_next_mtp|olmo_hybrid|kimi_linear
FOLDER``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

QWEN = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1, "initializer_range": 0.06, "eos_token_id": 1,
}  # fmt: skip

OLMO = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.06, "eos_token_id": 1,
    "pad_token_id": 0, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
# The names are those of checkpoints. On a CPU vLLM takes one width of latents, and states no larger than 16 of them.
KIMI = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": None, "mla_use_nope": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.06,
    "linear_attn_config": {
        "head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4],
    },
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 64, "num_shared_experts": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
    "use_grouped_topk": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 4, "moe_layer_freq": 1,
    "model_max_length": 4096, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
RENAMED = {  # of what transformers writes, parts of names that vLLM knows in other words; transformers reads both
    "olmo_hybrid": {"attention_layer_norm": "input_layernorm", ".feedforward_layer_norm": ".post_attention_layernorm"},
    "kimi_linear": {".block_sparse_moe.": ".mlp."},
}
MODELS = {  # transformers' name, and the configuration
    "qwen3_next": ("Qwen3Next", QWEN),
    # The layer that drafts has to have experts, and is the first one. All of them are taken: where two are nearly as
    # good, rounding would choose.
    "qwen3_next_mtp": ("Qwen3Next", QWEN | {"mlp_only_layers": [], "num_experts_per_tok": 4}),
    "olmo_hybrid": ("OlmoHybrid", OLMO),
    "kimi_linear": ("KimiLinear", KIMI),
}
FOLLOW = {"qwen3_next_mtp": 1.2, "olmo_hybrid": 1.7}  # for drafts: how strongly a token follows from the last


def build(name: str, config: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**config)
    config.architectures, config.dtype = [f"{name}ForCausalLM"], "bfloat16"
    return getattr(transformers, f"{name}ForCausalLM")(config)


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


def let_tokens_follow(model: nn.Module, strength: float) -> None:
    """Makes most tokens follow from the token before, in cycles of six. Then a draft that repeats what came before is
    mostly right, and so is a layer that drafts from a token's embedding. All layers still change log-probabilities."""
    index = torch.arange(model.config.vocab_size - 2)
    following = 2 + index // 6 * 6 + (index + 1) % 6
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
        came = nn.functional.normalize(model.get_input_embeddings().weight[2:].float(), dim=1)
        rows = model.get_output_embeddings().weight
        rows[following] += strength * came.to(rows.dtype)


def make(name: str, folder: str) -> None:
    torch.manual_seed(0)
    transformers_name, config = MODELS[name]
    model = build(transformers_name, config).to(torch.bfloat16)
    randomize(model)
    if name in FOLLOW:
        let_tokens_follow(model, FOLLOW[name])
    model.save_pretrained(folder)
    change(Path(folder) / "model.safetensors", lambda tensors: renamed(tensors, RENAMED.get(name, {})))
    if name == "qwen3_next_mtp":
        width, last = QWEN["hidden_size"], QWEN["num_hidden_layers"] - 1
        change(Path(folder) / "model.safetensors", lambda tensors: tensors | layer_that_drafts(tensors, width, last))
    if name == "kimi_linear":  # as above: in the names of checkpoints
        given = {"architectures": [f"{transformers_name}ForCausalLM"], "model_type": name, "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(given | config))


def change(path: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(how(load_file(path)), path, {"format": "pt"})


def renamed(tensors: dict[str, Tensor], parts: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for old, new in parts.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def layer_that_drafts(tensors: dict[str, Tensor], width: int, last: int) -> dict[str, Tensor]:
    """What checkpoints have for the prediction of several tokens (MTP): the ``last`` layer again, and what joins the
    next token's embedding and the hidden state. It adds a fifth of the hidden state, so the embedding decides what
    comes."""
    prefix = f"model.layers.{last}."
    layer = {f"mtp.layers.0.{n.removeprefix(prefix)}": t.clone() for n, t in tensors.items() if n.startswith(prefix)}
    norms = {f"mtp.{n}.weight": torch.zeros(width) for n in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    join = {"mtp.fc.weight": torch.cat([torch.eye(width), 0.2 * torch.eye(width)], 1)}
    return layer | {name: t.to(torch.bfloat16) for name, t in (norms | join).items()}


if __name__ == "__main__":
    make(*sys.argv[1:])
