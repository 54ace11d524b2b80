"""A dense Qwen3.5 text model with random weights: ``python qwen3_5.py FOLDER [HIDDEN [BLOCKS]]``.

A block is three linear layers and one of attention. 4,096 is the hidden size of transformers' default config, and heads
and widths follow from it as they do there. The vocabulary is smaller. vLLM 0.26 knows this text model as a part of a
model that sees pictures; `register` makes it known by itself.
"""

import sys

import torch

VOCABULARY = 32768


def make(folder: str, hidden: str = "4096", blocks: str = "2") -> None:
    from tiny_models import randomize
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    size, kinds = int(hidden), (["linear_attention"] * 3 + ["full_attention"]) * int(blocks)
    heads = {"linear_num_key_heads": size // 256, "linear_num_value_heads": size // 128}
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=len(kinds),
        layer_types=kinds, num_attention_heads=size // 256, num_key_value_heads=max(size // 1024, 1),
        dtype="bfloat16", **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(folder)


def register() -> None:
    """The text model, where vLLM does not know it, with what it asks of models whose layers keep states."""
    from vllm import ModelRegistry

    if "Qwen3_5ForCausalLM" in ModelRegistry.get_supported_archs():
        return
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    names = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
    of_states = {name: getattr(Qwen3_5ForConditionalGeneration, name) for name in names}
    ModelRegistry.register_model("Qwen3_5ForCausalLM", type("Text", (Qwen3_5ForCausalLM, IsHybrid), of_states))


if __name__ == "__main__":
    make(*sys.argv[1:])
