"""`generate` of transformers on a language model with recurrent state."""

import logging

import pytest
import torch
from tiny_model import KINDS, build, tokens
from torch.nn import functional as F

from flash_delta.models import FlashDeltaCache, FlashDeltaForSequenceClassification
from flash_delta.models.heads import CACHE

LENGTHS = [4, 9, 1]


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def left_padded(prompts):
    T = max(map(len, prompts))
    ids = torch.stack([F.pad(prompt, (T - len(prompt), 0)) for prompt in prompts])
    return ids, (ids != 0).long()


@torch.no_grad()
def test_greedy_generation_equals_repeated_full_forwards(model):
    ids = tokens(2, 5)
    generated = model.generate(ids, max_new_tokens=6, do_sample=False)
    for _ in range(6):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)


@torch.no_grad()
def test_left_padded_generation_equals_each_prompt_alone(model):
    prompts = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = left_padded(prompts)
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for n, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], max_new_tokens=5, do_sample=False)
        assert torch.equal(generated[n, -5:], alone[0, -5:])


@torch.no_grad()
def test_beam_search_scores_are_the_models_own(model):
    """A beam that continued another beam's state would be scored wrongly."""
    prompts = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = left_padded(prompts)
    options = {"max_new_tokens": 5, "num_beams": 4, "do_sample": False, "length_penalty": 0.0}
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options)
    for n, prompt in enumerate(prompts):
        text = torch.cat([prompt, output.sequences[n, -5:]])[None]
        log_probability = model(text).logits.log_softmax(-1)[0, -6:-1].gather(1, text[0, -5:, None]).sum()
        torch.testing.assert_close(output.sequences_scores[n].double(), log_probability, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_sampling_repeats_with_its_seed(model):
    ids = tokens(2, 5)
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        runs.append(model.generate(ids, max_new_tokens=5, do_sample=True))
    assert torch.equal(*runs)


@torch.no_grad()
def test_generation_continues_a_cache(model):
    ids = tokens(2, 5)
    first = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    resumed = model.generate(first.sequences, **{CACHE: first[CACHE]}, max_new_tokens=3, do_sample=False)
    assert torch.equal(resumed, model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("size", [1, 4, 20])
@torch.no_grad()
def test_a_prompt_may_be_read_in_pieces(model, size):
    ids, mask = left_padded([tokens(length, seed=length) for length in LENGTHS])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=size, **options), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **options), expected)


@torch.no_grad()
def test_samples_of_a_prompt_share_its_states(model):
    """The prompt is read once, and each of its samples continues in its own way."""
    ids, more, cache = tokens(2, 5), tokens(6, 3, seed=1), FlashDeltaCache(model.config)
    model(ids, past_key_values=cache)
    assert (cache.batch_size, cache.is_initialized, cache.has_previous_state()) == (2, True, True)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 6
    whole = model(torch.cat([ids.repeat_interleave(3, 0), more], 1)).logits[:, 5:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, whole)


def test_nothing_is_deprecated(model, monkeypatch):
    """transformers 5.24 renamed the cache. It logs names of before, once in a process."""
    said = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda _, message, *args: said.append(message))
    model.generate(tokens(2, 5), max_new_tokens=2, num_beams=2)
    classifier = FlashDeltaForSequenceClassification(model.config)
    assert classifier(tokens(2, 5), use_cache=True)[CACHE] is not None
    assert said == []
