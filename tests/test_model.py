"""The language model: caching, packing, saving and training."""

import contextlib
import importlib
import sys

import pytest
import torch
from tiny_model import KINDS, SIZES, build, tokens
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache

from flash_delta.models import FlashDeltaCache, FlashDeltaConfig, FlashDeltaForCausalLM, FlashDeltaModel
from flash_delta.models.heads import CACHE

LENGTHS = [4, 9, 1]


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_prefill_and_decode_equal_one_call(model):
    ids = tokens(2, 30)
    output = model(ids[:, :26])
    logits = [output.logits]
    for t in range(26, 30):
        output = model(ids[:, t : t + 1], cache=output[CACHE])
        logits.append(output.logits)
    assert_close(torch.cat(logits, dim=1), model(ids, use_cache=False).logits)
    assert output[CACHE].get_seq_length() == 30


@torch.no_grad()
def test_cache_exposes_the_states():
    cache = build("hybrid")(tokens(2, 5))[CACHE]
    assert isinstance(cache, FlashDeltaCache)
    gdn, attention, kda = cache.layers
    assert gdn.recurrent.shape == kda.recurrent.shape == (2, 2, 8, 8)
    assert [conv.shape for conv in gdn.conv] == [(2, 8, 4), (2, 8, 4), (2, 16, 4)]
    assert attention.keys.shape == (2, 2, 5, 4)


@torch.no_grad()
def test_reset_cache_starts_anew(model):
    ids = tokens(2, 5)
    cache = model(ids)[CACHE]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(ids, cache=cache).logits, model(ids).logits)


def test_a_cache_without_tokens():
    cache = FlashDeltaCache(FlashDeltaConfig(**SIZES, **KINDS["hybrid"]))
    cache.batch_repeat_interleave(3)
    assert (cache.batch_size, cache.is_initialized, cache.has_previous_state()) == (-1, False, False)
    assert (cache.get_seq_length(), cache.get_max_length()) == (0, -1)
    assert (cache.is_sliding, cache.is_compileable) == ([False] * 3, False)
    assert not any(getattr(cache, "is_linear", ()))  # such a layer has no length in 5.24


OLDER = {"get_max_cache_shape", "max_batch_size", "max_cache_len"}  # names of transformers 5.4


@pytest.mark.parametrize("name", [name for name in vars(Cache) if not name.startswith("_") and name not in OLDER])
def test_a_cache_has_what_transformers_calls(name):
    """Or it says that it has not."""
    cache = FlashDeltaCache(FlashDeltaConfig(**SIZES, **KINDS["hybrid"]))
    indices, x = torch.tensor([0]), torch.randn(1, 1, 1, 4)
    arguments = {"update": (x, x, 0), "early_initialization": (1, 1, 4, x.dtype, x.device), "get_mask_sizes": (1, 0)}
    arguments |= dict.fromkeys(("batch_select_indices", "reorder_cache"), (indices,)) | {"crop": (-1,)}
    arguments |= dict.fromkeys(("batch_repeat_interleave", "prefetch", "offload", "is_recording_past"), (1,))
    arguments |= dict.fromkeys(("get_conv_state", "get_recurrent_state"), (0,))
    arguments |= dict.fromkeys(("update_conv_state", "update_recurrent_state", "update_indexer"), (x, 0))
    with contextlib.suppress(NotImplementedError, ValueError):
        found = getattr(cache, name)
        if callable(found):
            found(*arguments.get(name, ()))


def test_packed_documents_equal_each_alone(model):
    documents = [tokens(length, seed=length) for length in LENGTHS]
    ids = torch.cat([*documents, tokens(2)])[None]
    cu_seqlens = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = model(ids, labels=ids, cu_seqlens=cu_seqlens)
    assert_close(packed.logits[0, :-2], torch.cat([model(document[None]).logits[0] for document in documents]))

    targets = [length - 1 for length in LENGTHS]
    losses = [model(d[None], labels=d[None]).loss * n for d, n in zip(documents, targets, strict=True) if n]
    assert_close(packed.loss, sum(losses) / sum(targets))
    gradients = torch.autograd.grad(packed.loss, list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_loss_is_the_shifted_cross_entropy(model):
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert_close(output.loss, expected)


def test_logits_to_keep(model):
    ids = tokens(2, 9)
    assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:])
    with pytest.raises(ValueError, match="logits_to_keep: expected 0 with labels"):
        model(ids, labels=ids, logits_to_keep=2)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_model_loads_equal(tmp_path, tied):
    config = FlashDeltaConfig(**SIZES, mixers=["gdn", "attention", "kda"], tie_word_embeddings=tied)
    model = FlashDeltaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FlashDeltaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).mixers == config.mixers
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


def test_gate_parameters_stay_fp32_when_loaded_in_half(tmp_path):
    build("hybrid").float().save_pretrained(tmp_path)
    model = FlashDeltaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        in_fp32 = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if in_fp32 else torch.bfloat16), name
    assert model(tokens(2, 9)).logits.dtype == torch.bfloat16


def test_parameters_missing_in_a_checkpoint_are_initialised(tmp_path):
    saved = build("hybrid").float()
    fresh = ("A_log", "dt_bias", "conv1d.weight", "lm_head.weight")
    kept = {name: tensor for name, tensor in saved.state_dict().items() if not name.endswith(fresh)}
    saved.save_pretrained(tmp_path, state_dict=kept)
    loaded = FlashDeltaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, kept[name]) if name in kept else tensor.isfinite().all(), name
    assert all(0 < loaded[name].abs().max() <= 0.5 for name in loaded if "conv1d" in name)
    assert all(loaded[name].exp().min() >= 1e-4 * 0.99 for name in loaded if "A_log" in name)
    assert 0.1 < loaded["lm_head.weight"].std() / SIZES["initializer_range"] < 2


def test_a_tiny_text_is_learnt():
    torch.manual_seed(0)
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**SIZES, **KINDS["hybrid"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, losses = tokens(2, 16), []
    for _ in range(25):
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 4


def test_gradient_checkpointing_changes_no_gradient(model):
    ids = tokens(2, 9)
    model.train()
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    new_name = hasattr(model, "activation_checkpointing_enable")  # transformers warns of the old one where it exists
    (model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable)()
    gradients = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert_close(gradient, expected_gradient)
    with pytest.raises(ValueError, match="use_cache: expected False under gradient checkpointing"):
        model(ids, use_cache=True)


def test_training_returns_no_cache(model):
    assert getattr(model.train()(tokens(2, 9)), CACHE) is None


def test_embeddings_may_be_given_in_place_of_tokens(model):
    ids = tokens(2, 9)
    assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="input_ids: expected either input_ids or inputs_embeds"):
        model()


def test_foreign_cache_is_refused():
    with pytest.raises(ValueError, match=r"cache \(or past_key_values\): expected a FlashDeltaCache, got DynamicCache"):
        FlashDeltaModel(FlashDeltaConfig(**SIZES))(tokens(2, 9), cache=DynamicCache())


@torch.no_grad()
def test_both_names_of_the_cache(model):
    """transformers renamed it in 5.24."""
    ids = tokens(2, 9)
    for name in ("cache", "past_key_values"):
        for of in (model, model.model):
            cache = FlashDeltaCache(model.config)
            parts = [of(part, **{name: cache})[0] for part in ids.split([6, 3], 1)]
            assert_close(torch.cat(parts, dim=1), of(ids, use_cache=False)[0])
    with pytest.raises(ValueError, match="cache: expected None with past_key_values, its other name, got both"):
        model(ids, cache=cache, past_key_values=cache)


def test_attention_every_nth_layer():
    config = FlashDeltaConfig(num_hidden_layers=6, mixer="kda", attention_every=3)
    assert config.mixers == ["kda", "kda", "attention"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixers": ["gdn", "mamba", "kda"]}, r"mixers: expected names among .* got \['mamba'\]"),
        ({"mixers": ["gdn"]}, "mixers: expected one per layer, 3, got 1"),
        ({"mixer": "rwkv"}, r"mixers: expected names among .* got \['rwkv'\]"),
        ({"lower_bound": -5.0}, "lower_bound: expected None without a 'kda' mixer, got -5.0"),
        ({"use_forget_gate": False}, "use_forget_gate: expected True without a 'gdp' mixer, got False"),
        ({"attention_every": 0}, "attention_every: expected a positive number or None, got 0"),
    ],
)
def test_configuration_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        FlashDeltaConfig(num_hidden_layers=3, **arguments)


def test_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "flash_delta.models")
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'flash-delta\[transformers\]'"):
        importlib.import_module("flash_delta.models")
