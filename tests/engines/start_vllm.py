"""A dense Qwen3.5 text model with random weights in vLLM: ``python start_vllm.py FOLDER OUT EAGER [HIDDEN]``.

It makes the model in FOLDER where there is none, completes three prompts, and writes the tokens, the versions, and the
seconds that it took. FLASH_DELTA_VLLM=1 runs it on this library. vLLM 0.26 knows this text model as a part of a model
that sees pictures; here it is registered by itself.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import torch


def make(folder: Path, hidden: int) -> None:
    from tiny_models import randomize
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    heads = {"linear_num_key_heads": hidden // 256, "linear_num_value_heads": hidden // 128}
    config = Qwen3_5TextConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=len(kinds),
        layer_types=kinds, num_attention_heads=hidden // 256, num_key_value_heads=max(hidden // 1024, 1),
        dtype="bfloat16", **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(folder)


def register() -> None:
    """The text model, with what vLLM asks of models whose layers keep states."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    names = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
    of_states = {name: getattr(Qwen3_5ForConditionalGeneration, name) for name in names}
    ModelRegistry.register_model("Qwen3_5ForCausalLM", type("Text", (Qwen3_5ForCausalLM, IsHybrid), of_states))


def main(folder: str, out: str, eager: str, hidden: str = "2048") -> None:
    if not Path(folder, "config.json").exists():
        make(Path(folder), int(hidden))
    from vllm import LLM, SamplingParams

    register()
    start = time.perf_counter()
    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=2048, max_num_seqs=8,
        enforce_eager=eager == "1", enable_prefix_caching=False, mamba_ssm_cache_dtype="float32",
        gpu_memory_utilization=0.3, gdn_prefill_backend="triton",
        attention_backend="TRITON_ATTN" if torch.cuda.is_available() else None,
    )  # fmt: skip
    started = time.perf_counter() - start
    gen = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(2, 4096, (n,), generator=gen).tolist()} for n in (7, 130, 700)]
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    found = {"versions": {name: import_module(name).__version__ for name in ("vllm", "torch", "transformers")}}
    found |= {"start_s": started, "tokens": [list(answer.outputs[0].token_ids) for answer in answers]}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
