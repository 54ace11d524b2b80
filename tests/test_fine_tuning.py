"""The example of fine-tuning. The development set is without trl; `make newest` has it."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from peft import PeftModel
from test_integrations_transformers import float64
from tiny_transformers import build
from typer.testing import CliRunner

from flash_delta.integrations.transformers import enable
from flash_delta.testing import assert_accurate, relative_error
from flash_delta.training import byte_tokenizer

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),  # trl's own name for it
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),  # of a CPU
]
IN_LINEAR_ATTENTION = {
    "qwen3_next": {"in_proj_qkvz", "in_proj_ba", "out_proj"},
    "qwen3_5": {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    return import_module("fine_tuning")


def run(example, *options):
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, [str(option) for option in options])


def test_a_tiny_model_learns(example, tmp_path):
    out = run(example, "--out", tmp_path, "--steps", 6)
    assert out.exit_code == 0, out.output
    first, last = re.search(r"loss (\d\.\d+), after 6 steps (\d\.\d+)", out.output).groups()
    assert float(last) < float(first)
    ids = torch.randint(256, (1, 9))
    base = example.tiny()[0].eval()
    plain = base(ids).logits
    assert not torch.equal(PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits, plain)


def test_a_checkpoint_and_documents_from_files(example, tmp_path):
    """The checkpoint stays as it is. Of a document that is longer than a row, the row has the beginning."""
    model, tokenizer = example.tiny()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    weights = (tmp_path / "model/model.safetensors").read_bytes()
    for name, document in (
        ("texts", {"text": "once upon a time"}),
        ("chats", {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(document)}\n" * 4)
        files = ("--model", tmp_path / "model", "--data", tmp_path / f"{name}.jsonl", "--out", tmp_path / name)
        out = run(example, *files, "--steps", 1, "--tokens", 12)
        assert out.exit_code == 0, out.output
        assert (tmp_path / name / "adapter_model.safetensors").exists()
    assert (tmp_path / "model/model.safetensors").read_bytes() == weights


def trainer_of(example, model, folder):
    """A trainer on four documents in one row, whose adapters change the model from the start."""
    texts = [{"text": text} for text in ("one", "another text", "the third of them", "and a last one")]
    trainer = example.fine_tuning(model, byte_tokenizer(), datasets.Dataset.from_list(texts), folder, 64, 2)
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return trainer


# trl adds a loss of balance between experts. It depends on the whole batch, so here its weight is 0.
SIZES = {"vocab_size": 256, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SIZES |= {"router_aux_loss_coef": 0.0}


@pytest.mark.parametrize("family", IN_LINEAR_ATTENTION)
def test_every_projection_is_adapted_and_nothing_else_changes(example, family, tmp_path):
    model = build(family, **SIZES)
    with enable(model):
        trainer = trainer_of(example, model, tmp_path)
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
    modules = (name.split(".") for name, _ in trainer.model.named_modules() if name.endswith(".lora_A"))
    adapted = {(mixer, projection) for *_, mixer, projection, _ in modules}
    softmax = {"q_proj", "k_proj", "v_proj", "o_proj"}
    linear = IN_LINEAR_ATTENTION[family]
    assert adapted == {*(("linear_attn", name) for name in linear), *(("self_attn", name) for name in softmax)}
    changed = {name for name, parameter in trainer.model.named_parameters() if not parameter.equal(before[name])}
    assert changed == {name for name in before if ".lora_" in name}


@pytest.mark.parametrize("family", IN_LINEAR_ATTENTION)
def test_no_document_sees_the_one_before(example, family, tmp_path):
    """A packed row has the loss and the gradients of its documents one by one. Without its bounds it has others."""
    model = build(family, torch.float64, **SIZES)
    with float64(family), enable(model):
        trainer = trainer_of(example, model, tmp_path)
        batch, model = next(iter(trainer.get_train_dataloader())), trainer.model.eval()
        assert "attention_mask" not in batch
        lengths = batch["cu_seq_lens_q"].diff().tolist()
        rows = batch["input_ids"].split(lengths, dim=1)
        assert len(rows) == 4
        targets = sum(lengths) - len(lengths)
        packed = gradients(model, model(**batch, use_cache=False).loss)
        alone = gradients(model, sum(model(row, labels=row).loss * (row.shape[1] - 1) for row in rows) / targets)
        joined = gradients(model, model(batch["input_ids"], labels=batch["labels"]).loss)
    for name, want in alone.items():
        assert_accurate(name, packed[name], want, torch.float64)
    assert max(relative_error(joined[name], want) for name, want in alone.items()) > 1e-2


@pytest.mark.parametrize("family", IN_LINEAR_ATTENTION)
def test_the_loss_of_trl_is_that_of_the_documents(example, family, tmp_path):
    """trl computes it from the decoder's output, in float32."""
    model = build(family, **SIZES)
    with enable(model), torch.no_grad():
        trainer = trainer_of(example, model, tmp_path)
        batch = next(iter(trainer.get_train_dataloader()))
        rows = batch["input_ids"].split(batch["cu_seq_lens_q"].diff().tolist(), dim=1)
        nats = sum(trainer.model(row, labels=row).loss * (row.shape[1] - 1) for row in rows)
        loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(loss, nats / sum(row.shape[1] - 1 for row in rows))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad} | {"loss": loss.detach()}
