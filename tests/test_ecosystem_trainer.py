"""transformers' Trainer on our models: what it computes, in every form that a user may ask it for."""

import dataclasses

import pytest
import torch
from tiny_model import KINDS, SIZES, tokens
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from flash_delta.models import (
    FlashDeltaConfig,
    FlashDeltaForCausalLM,
    FlashDeltaForSequenceClassification,
    parameter_groups,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}
# transformers renamed it, and warns of the old name where it has the new one
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in NAMES else "gradient_checkpointing"


def build(kind="hybrid", cls=FlashDeltaForCausalLM, **options):
    torch.manual_seed(0)
    return cls(FlashDeltaConfig(**SIZES | KINDS[kind] | options))


def rows(count=8):
    """Sequences of which fewer and fewer tokens are targets: a mean per batch is not one over all."""
    dataset = []
    for n, ids in enumerate(tokens(count, 12)):
        labels = ids.clone()
        labels[: n + 1] = -100
        dataset.append({"input_ids": ids, "labels": labels})
    return dataset


def trainer(folder, model=None, dataset=None, collator=None, optimizers=(None, None), **options):
    defaults = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "optim": "sgd"}
    defaults |= {"learning_rate": 0.1, "report_to": [], "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
    return Trainer(
        build() if model is None else model,
        TrainingArguments(output_dir=str(folder), **defaults | options),
        train_dataset=rows() if dataset is None else dataset,
        data_collator=collator,
        optimizers=optimizers,
    )


def trained(folder, **options):
    """The parameters after two steps."""
    run = trainer(folder, **options)
    run.train()
    return dict(run.model.named_parameters())


def assert_same(got, expected, **tolerance):
    for name, parameter in expected.items():
        torch.testing.assert_close(got[name], parameter, **tolerance)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("kind", KINDS)
def test_train_evaluate_and_predict(tmp_path, kind):
    run = trainer(tmp_path, build(kind), max_steps=6)
    before = run.evaluate(rows())["eval_loss"]
    run.train()
    after = run.evaluate(rows())["eval_loss"]
    assert after < before
    prediction = run.predict(rows(5))
    assert prediction.predictions.shape == (5, 12, SIZES["vocab_size"])
    logits, labels = torch.from_numpy(prediction.predictions), torch.stack([row["labels"] for row in rows(5)])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert prediction.metrics["test_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_bfloat16(tmp_path, plain):
    got = trained(tmp_path, bf16=True)
    assert any(not torch.equal(got[name], parameter) for name, parameter in plain.items())
    assert_same(got, plain, atol=0.05, rtol=0.05)


@GPU
def test_float16(tmp_path, plain):
    """On a CPU accelerate trains in float32 when it is asked for float16."""
    got = trained(tmp_path, fp16=True)
    assert any(not torch.equal(got[name], parameter) for name, parameter in plain.items())
    assert_same(got, plain, atol=0.02, rtol=0.02)


def test_accumulated_batches_equal_one(tmp_path):
    """Their losses are divided by the number of targets in all of them."""
    one = trained(tmp_path, model=build().double())
    four = trained(tmp_path, model=build().double(), per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert_same(four, one, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(tmp_path, plain, use_reentrant):
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": use_reentrant}}
    assert_same(trained(tmp_path, **options), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_compiled(tmp_path):
    """By inductor, as `torch_compile=True` asks for: one layer takes it long enough."""
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1, "mixers": ["gdn"]}
    expected = trained(tmp_path, model=build(**one), use_cpu=True)
    got = trained(tmp_path, model=build(**one), use_cpu=True, torch_compile=True)
    assert_same(got, expected, atol=1e-5, rtol=1e-4)


def test_compiled_without_code_generation(tmp_path):
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1, "mixers": ["gdn"]}
    expected = trained(tmp_path, model=build(**one))
    got = trained(tmp_path, model=build(**one), torch_compile=True, torch_compile_backend="eager")
    assert_same(got, expected, atol=1e-6, rtol=1e-5)


def test_a_resumed_run_ends_at_the_same_parameters(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    expected = trained(tmp_path / "whole", **options)
    again = trainer(tmp_path / "whole", build(initializer_range=0.01), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.state.global_step == 4
    assert_same(dict(again.model.named_parameters()), expected, atol=0, rtol=0)


def test_label_smoothing_shifts_the_labels(tmp_path):
    """Trainer shifts them for the models that it knows by name."""
    run = trainer(tmp_path, label_smoothing_factor=0.2)
    dataset = rows(4)
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in dataset]).to(run.model.device)
        logits = run.model(ids).logits[:, :-1].flatten(0, 1).cpu()
    targets = torch.stack([row["labels"] for row in dataset])[:, 1:].flatten()
    expected = F.cross_entropy(logits, targets, label_smoothing=0.2)
    assert run.evaluate(dataset)["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_groups_of_parameters_as_the_optimizer(tmp_path):
    model = build()
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
    run = trainer(tmp_path, model, optimizers=(optimizer, None), learning_rate=1e-3)
    run.train()
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
    assert run.optimizer.optimizer is optimizer


DOCUMENTS = [{"input_ids": tokens(length, seed=length).tolist()} for length in (4, 9, 7, 5)]


def assert_documents_are_apart(run):
    """The loss of one flattened row is that of its documents, each in a row of its own."""
    with torch.no_grad():
        ids = [torch.tensor([document["input_ids"]], device=run.model.device) for document in DOCUMENTS]
        losses = [run.model(x, labels=x).loss * (x.shape[1] - 1) for x in ids]
    expected = sum(losses) / sum(x.shape[1] - 1 for x in ids)
    assert run.evaluate(DOCUMENTS)["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_flattened_documents_with_bounds(tmp_path, kind):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    run = trainer(tmp_path, build(kind), DOCUMENTS, collator)
    assert_documents_are_apart(run)
    run.train()
    assert_documents_are_apart(run)


def test_flattened_documents_with_positions(tmp_path):
    run = trainer(tmp_path, build(), DOCUMENTS, DataCollatorWithFlattening(return_tensors="pt"))
    assert_documents_are_apart(run)


def test_sequence_classification(tmp_path):
    """Batches that are accumulated equal one: its loss is a mean over rows."""
    dataset = [{"input_ids": ids, "labels": torch.tensor(n % 3)} for n, ids in enumerate(tokens(8, 12))]
    results = []
    for options in ({}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}):
        model = build(cls=FlashDeltaForSequenceClassification, num_labels=3)
        results.append(trained(tmp_path, model=model, dataset=dataset, **options))
    assert_same(*results, atol=1e-6, rtol=1e-5)
    run = trainer(tmp_path, model, dataset)
    assert run.predict(dataset[:5]).predictions.shape == (5, 3)
    assert run.evaluate(dataset)["eval_loss"] > 0
