"""A dense Qwen3.5 text model with random weights: ``python qwen3_5.py FOLDER [HIDDEN [BLOCKS [RANKS [FOLLOWS]]]]``.

A block is three linear layers and one of attention. 4,096 is the hidden size of transformers' default config, and heads
and widths follow from it as they do there. Of several ranks (tensor parallelism) it is what one of them computes: a
part of the heads and of the inner width, with the whole hidden size. The vocabulary is smaller. Most tokens follow from
the one before, as strongly as FOLLOWS says, and a layer drafts (MTP). So drafts are mostly accepted. vLLM 0.26 knows
this text model as a part of a model that sees pictures; `register` makes it known by itself.
"""

import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 32768
EMBEDDED = 8.0  # times what tiny models have: wide layers add more to embeddings


def make(folder: str, hidden: str = "4096", blocks: str = "2", ranks: str = "1", follows: str = "0.8") -> None:
    from safetensors.torch import save_file
    from tiny_models import layer_that_drafts, let_tokens_follow, randomize
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    size, kinds = int(hidden), (["linear_attention"] * 3 + ["full_attention"]) * int(blocks)
    part = size // int(ranks)
    heads = {"linear_num_key_heads": part // 256, "linear_num_value_heads": part // 128}
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=size, intermediate_size=3 * part, num_hidden_layers=len(kinds),
        layer_types=kinds, num_attention_heads=part // 256, num_key_value_heads=max(part // 1024, 1),
        dtype="bfloat16", mtp_num_hidden_layers=1, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
        randomize(model)
        model.get_input_embeddings().weight.data.mul_(EMBEDDED)
        let_tokens_follow(model, float(follows))
    model.save_pretrained(folder)
    # transformers does not read this file. vLLM reads all.
    drafts = layer_that_drafts(model.cpu().state_dict(), size, len(kinds) - 1)
    save_file(drafts, Path(folder) / "mtp.safetensors", {"format": "pt"})


def register() -> None:
    """The text model and its drafts, where vLLM does not know them, with what it asks of models whose layers keep
    states."""
    from vllm import ModelRegistry
    from vllm.config import SpeculativeConfig

    if "Qwen3_5ForCausalLM" in ModelRegistry.get_supported_archs():
        return
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    names = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
    of_states = {name: getattr(Qwen3_5ForConditionalGeneration, name) for name in names}
    ModelRegistry.register_model("Qwen3_5ForCausalLM", type("Text", (Qwen3_5ForCausalLM, IsHybrid), of_states))
    theirs = SpeculativeConfig.hf_config_override

    def override(config: Any) -> Any:
        if config.model_type == "qwen3_5_text":
            config.model_type = "qwen3_5"
        return theirs(config)

    SpeculativeConfig.hf_config_override = staticmethod(override)


if __name__ == "__main__":
    make(*sys.argv[1:])
