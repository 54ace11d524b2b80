"""peft's adapters and accelerate's loop on our models."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny_model import KINDS, SIZES, tokens
from torch.utils.data import DataLoader

from flash_delta.models import (
    FlashDeltaConfig,
    FlashDeltaForCausalLM,
    FlashDeltaForSequenceClassification,
    parameter_groups,
)

TASKS = {
    "CAUSAL_LM": (FlashDeltaForCausalLM, tokens(2, 9)),
    "SEQ_CLS": (FlashDeltaForSequenceClassification, torch.tensor([0, 1])),
}


def build(cls=FlashDeltaForCausalLM, kind="hybrid"):
    torch.manual_seed(0)
    return cls(FlashDeltaConfig(**SIZES, **KINDS[kind])).double()


def lora(base, task, **options):
    return get_peft_model(base, LoraConfig(task_type=task, r=2, **{"target_modules": "all-linear"} | options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_lora_is_trained_saved_loaded_and_merged(tmp_path, task, kind):
    cls, labels = TASKS[task]
    ids = tokens(2, 9)
    model = lora(build(cls, kind), task).train()
    plain = build(cls, kind)(ids).logits
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2)
    for _ in range(2):  # of two factors, one starts as zeros
        model(input_ids=ids, labels=labels).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    logits = model.eval()(input_ids=ids).logits
    assert not torch.allclose(logits, plain)

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(cls, kind), tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, logits)
    merged = model.merge_and_unload()
    assert type(merged) is cls
    torch.testing.assert_close(merged(ids).logits, logits)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_lora_under_activation_checkpointing(use_reentrant):
    """The embedding is frozen, and a block's input needs no gradient of its own."""
    ids, gradients = tokens(2, 9), []
    for checkpointed in (False, True):
        model = lora(build(), "CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"]).train()
        if checkpointed:
            base = model.get_base_model()
            name = "activation_checkpointing_enable"
            enable = getattr(base, name if hasattr(base, name) else "gradient_checkpointing_enable")
            enable({"use_reentrant": use_reentrant})
            base.enable_input_require_grads()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    torch.testing.assert_close(*gradients)


def test_prompt_tuning():
    """Learnt embeddings in front of the text: inputs_embeds and longer labels. The mask that peft makes is a float."""
    ids = tokens(2, 9)
    model = get_peft_model(build(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).train()
    with pytest.raises(ValueError, match="attention_mask: expected bool or integers"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    model(input_ids=ids, labels=ids).loss.backward()
    (prompt,) = (p for p in model.parameters() if p.requires_grad)
    assert prompt.grad.abs().max() > 0


@torch.no_grad()
def test_generation_with_an_adapter():
    ids = tokens(2, 5)
    model = lora(build(), "CAUSAL_LM", init_lora_weights=False).eval()
    generated = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    for _ in range(4):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)


@pytest.fixture
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tmp_path, fresh_accelerator, precision):
    """A loop of accelerate's computes what the same loop without it does."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model, plain = build().float(), build().float()
    loader, optimizer = DataLoader(tokens(8, 9), batch_size=2), torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for n, ids in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            (plain(ids, labels=ids).loss / 2).backward()
        if n % 2:
            expected.step()
            expected.zero_grad()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    unwrapped = accelerator.unwrap_model(model)
    for got, want in zip(unwrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    unwrapped.save_pretrained(tmp_path / "model", save_function=accelerator.save)
    loaded = FlashDeltaForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), unwrapped.parameters(), strict=True))
