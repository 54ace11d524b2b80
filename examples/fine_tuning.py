"""Fine-tunes a checkpoint with linear attention by trl and peft: LoRA on packed documents.

    python examples/fine_tuning.py
    python examples/fine_tuning.py --model Qwen/Qwen3.5-0.8B-Base --data texts.jsonl --tokens 4096 --steps 200
    python examples/fine_tuning.py --model Qwen/Qwen3-Next-80B-A3B-Instruct --data chats.jsonl --tokens 4096 --steps 200

It needs `pip install trl peft`. The first command takes seconds on a CPU: a tiny Qwen3.5 with random weights reads
sums. Each line of `--data` is a JSON object: {"text": "..."}, or {"messages": [...]} for a checkpoint with a chat
template. `--out` gets the adapter, which `peft.PeftModel.from_pretrained(model, OUT)` puts on the checkpoint again.

`packing=True` puts whole documents into rows of `--tokens`, and cuts a longer document to that length. trl then gives
the model positions and bounds of the documents, and no padding. Under `enable` linear attention reads them: no document
sees the one before. LoRA adapts all projections of linear attention and of softmax attention, also those of decays and
write strengths. All else stays as it is in the checkpoint: A_log, dt_bias, short convolutions, norms, experts. Do not
ask for "all-linear" with a mixture of experts: peft would adapt every routed expert and the router, too.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from trl import SFTConfig, SFTTrainer

from flash_delta.integrations.transformers import enable
from flash_delta.training import byte_tokenizer


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen3.5 of four layers, one of them softmax attention, whose tokens are bytes."""
    torch.manual_seed(0)
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **attention, **linear)), byte_tokenizer()


def sums() -> Dataset:
    return Dataset.from_list([{"text": f"{a} + {b} = {a + b}"} for a in range(32) for b in range(32)])


def projections(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers in both kinds of attention, such as in_proj_qkv and q_proj."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear if ".linear_attn." in name or ".self_attn." in name})


def fine_tuning(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, out: Path, tokens: int, steps: int
) -> SFTTrainer:
    return SFTTrainer(
        model,
        args=SFTConfig(
            str(out),
            packing=True,
            max_length=tokens,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=2e-4,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=projections(model)),
    )


def main(
    model: Annotated[str | None, typer.Option(help="A checkpoint's name or folder; none: a tiny random model.")] = None,
    data: Annotated[Path | None, typer.Option(help="Documents, as lines of JSON; none: sums.", exists=True)] = None,
    out: Annotated[Path, typer.Option(help="The adapter's folder.")] = Path("runs/adapter"),
    tokens: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 256,
    steps: Annotated[int, typer.Option(help="Steps of one row on each device.", min=1)] = 20,
) -> None:
    if model is None:
        base, tokenizer = tiny()
    else:
        base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(model)
    documents = sums() if data is None else Dataset.from_json(str(data))
    with enable(base):
        trainer = fine_tuning(base, tokenizer, documents, out, tokens, steps)
        trainer.model.print_trainable_parameters()
        trainer.train()
        trainer.save_model()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    print(f"loss {losses[0]:.3f}, after {steps} steps {losses[-1]:.3f}; the adapter is in {out}")


if __name__ == "__main__":
    typer.run(main)
