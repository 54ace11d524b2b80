"""What code that is written for transformers' models may do with ours."""

import copy
import os
import pickle

import pytest
import torch
from tiny_model import KINDS, SIZES, build, tokens
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from flash_delta.models import (
    FlashDeltaConfig,
    FlashDeltaForCausalLM,
    FlashDeltaForSequenceClassification,
    FlashDeltaModel,
    modeling,
)
from flash_delta.models.heads import CACHE


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_positions_that_the_model_counts_itself_change_nothing(model):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    assert_close(model(ids, position_ids=torch.arange(9)[None]).logits, model(ids).logits)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert_close(model(ids, mask, positions).logits, model(ids, mask).logits)
    start = model(ids[:, :6], mask[:, :6], positions[:, :6], use_cache=True)
    rest = model(ids[:, 6:], mask, positions[:, 6:], cache=start[CACHE])
    assert_close(rest.logits, model(ids, mask).logits[:, 6:])


def test_positions_rotate_queries_and_keys():
    model, ids = build("hybrid"), tokens(2, 9)
    positions = torch.arange(9)[None]
    assert_close(model(ids, position_ids=positions + 5).logits, model(ids).logits)  # only distances count
    spread = model(ids, position_ids=2 * positions).logits
    assert not torch.allclose(spread, model(ids).logits, atol=1e-3)
    gdn = build("gdn")  # knows the order of tokens only
    assert_close(gdn(ids, position_ids=2 * positions).logits, gdn(ids).logits)


def test_positions_of_another_shape_are_refused(model):
    expected = r"position_ids: expected shape \[B, T\] = \[2, 9\] or \[1, T\] = \[1, 9\], got "
    for shape in ((3, 2, 9), (2, 8), (3, 9), (9,)):
        with pytest.raises(ValueError, match=expected):
            model(tokens(2, 9), position_ids=torch.arange(shape[-1]).expand(shape))


def test_hidden_states(model):
    ids, n = tokens(2, 9), model.config.num_hidden_layers
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == n + 1
    x = model.model.embed_tokens(ids)
    for block, hidden in zip(model.model.layers, output.hidden_states, strict=False):
        assert_close(hidden, x)
        x = block(x, None, None, None, None, None)
    assert_close(output.hidden_states[-1], model.model.norm(x))
    assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == n + 1
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_attention_weights_are_none_and_a_warning_says_so(model, monkeypatch):
    warnings = []
    monkeypatch.setattr(modeling.logger, "warning_once", warnings.append)
    assert model(tokens(2, 9)).attentions is None
    assert warnings == []
    assert model(tokens(2, 9), output_attentions=True).attentions is None
    model.set_attn_implementation("eager")  # or transformers refuses the next line
    model.config.output_attentions = True
    model(tokens(2, 9))
    assert len(warnings) == 2
    assert warnings[0].startswith("output_attentions: no mixer of this model returns attention weights")


def test_return_dict(model):
    ids = tokens(2, 9)
    loss, logits, cache = model(ids, labels=ids, return_dict=False)
    assert_close(loss, model(ids, labels=ids).loss)
    assert cache.get_seq_length() == 9
    model.config.return_dict = False
    assert_close(model(ids)[0], logits)
    assert_close(model(ids, return_dict=True).logits, logits)


def test_num_items_in_batch_divides_the_sum_of_losses(model):
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    sum_of_losses = model(ids, labels=labels).loss * 13
    for count in (7, torch.tensor(7)):
        assert_close(model(ids, labels=labels, num_items_in_batch=count).loss, sum_of_losses / 7)


def test_labels_of_another_shape_are_refused(model):
    """[1, 17] has as many targets as [2, 9]."""
    with pytest.raises(ValueError, match=r"labels: expected shape \[B, T\] = \[2, 9\], got \[1, 17\]"):
        model(tokens(2, 9), labels=tokens(1, 17))


def test_logits_of_chosen_tokens(model):
    ids = tokens(2, 9)
    assert_close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, model(ids).logits[:, [1, 5]])
    with pytest.raises(ValueError, match=r"logits_to_keep: expected a number or indices \[M\], got \[2, 3\]"):
        model(ids, logits_to_keep=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="logits_to_keep: expected 0 with labels"):
        model(ids, labels=ids, logits_to_keep=torch.tensor([1]))


def test_bounds_by_either_name(model):
    ids, bounds = tokens(1, 9), torch.tensor([0, 4, 9], dtype=torch.int32)
    names = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    expected = model(ids, labels=ids, cu_seqlens=bounds)
    got = model(ids, labels=ids, position_ids=restarting, **names)
    assert_close(got.logits, expected.logits)
    assert_close(got.loss, expected.loss)
    with pytest.raises(ValueError, match="cu_seqlens: expected None with cu_seq_lens_q"):
        model(ids, cu_seqlens=bounds, **names)


@torch.no_grad()
def test_generation_returns_what_is_asked_for(model):
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(tokens(2, 5), output_hidden_states=True, output_attentions=True, **options)
    assert [states[-1].shape[1] for states in output.hidden_states] == [5, 1, 1]
    for states, logits in zip(output.hidden_states, output.logits, strict=True):
        assert_close(model.lm_head(states[-1][:, -1]).float(), logits)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_in_both_forms(model, use_reentrant):
    ids = tokens(2, 9)
    model.train()(ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    name = "activation_checkpointing_enable"  # transformers warns of the old name where it has the new one
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": use_reentrant})
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name])


def marked(model):
    return {name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)}


def test_marks_survive_copies_and_files(tmp_path):
    model = build("hybrid").float()
    names = {name for name, _ in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    assert len(names) == 4
    model.save_pretrained(tmp_path)
    copies = [model, copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), pickle.loads(pickle.dumps(model))]
    copies += [FlashDeltaForCausalLM.from_pretrained(tmp_path), copies[1].half()]
    assert [marked(each) for each in copies] == [names] * len(copies)


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_is_resized(tied):
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**SIZES, **KINDS["hybrid"], tie_word_embeddings=tied)).eval()
    ids = tokens(2, 9)
    logits = model(ids).logits
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model.config.vocab_size == 40
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    torch.testing.assert_close(model(ids).logits[..., :31], logits)


def test_loaded_from_many_files_onto_named_devices(tmp_path):
    model, ids = build("hybrid").float(), tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]) > 2
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {"model.layers.1": "cpu", "model.layers.2": "disk"}
    for device_map in ("cpu", "auto", parts):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "off")
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    asked = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")  # what Attention calls
    assert torch.equal(asked(ids).logits, model(ids).logits)


def test_sequence_classification(tmp_path):
    decoder, ids = build("hybrid").float(), tokens(3, 9)
    ids[0, 5:] = ids[1, :4] = SIZES["pad_token_id"]
    mask = (ids != SIZES["pad_token_id"]).long()
    decoder.save_pretrained(tmp_path / "decoder")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "decoder", num_labels=3)
    assert type(model) is FlashDeltaForSequenceClassification
    assert type(AutoModel.from_pretrained(tmp_path / "decoder")) is FlashDeltaModel
    hidden = decoder.model(ids, mask).last_hidden_state
    expected = model.score(hidden[[0, 1, 2], [4, 8, 8]])
    labels = torch.tensor([2, 0, 1])
    output = model(ids, mask, labels=labels, output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, F.cross_entropy(expected, labels))
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert model(ids, mask, labels=labels, return_dict=False)[1].shape == (3, 3)
    model.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(loaded(ids, mask).logits, output.logits)


@torch.no_grad()
def test_pipelines():
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(SIZES["vocab_size"])}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1")
    model = build("hybrid").float()
    (text,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        ["w5 w6"], max_new_tokens=3, do_sample=False
    )
    expected = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)[0, 2:]
    assert text[0]["generated_text"].removeprefix("w5 w6").split() == [f"w{n}" for n in expected.tolist()]
    classifier = FlashDeltaForSequenceClassification(FlashDeltaConfig(**SIZES, **KINDS["hybrid"])).eval()
    labels = pipeline("text-classification", model=classifier, tokenizer=tokenizer)(["w5 w6", "w3"], batch_size=2)
    assert len(labels) == 2
