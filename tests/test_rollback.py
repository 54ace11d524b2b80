"""States that are rolled back: by `crop`, and by `generate` with drafts, some of which are rejected."""

import copy
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")

import tiny_transformers
from test_integrations_transformers import GENERATING, float64
from test_integrations_transformers import tokens as words
from tiny_layers import DELTA_LAYERS, D, random
from tiny_model import KINDS, build, tokens
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

import flash_delta
from flash_delta.integrations.transformers import enable
from flash_delta.layers import Attention, AttentionState, MixerState
from flash_delta.layers.packing import Packing
from flash_delta.layers.state import KEPT, Replay
from flash_delta.models import FlashDeltaCache
from flash_delta.models.heads import CACHE

LONG = KEPT + 13  # a prompt that is read in two parts
UNEVEN = {"comba", "comba-grouped", "gla", "gla-grouped"}  # their ops run in chunks
REFUSED = {"bailing_hybrid"}  # its layers are not among those whose source is known
if not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):  # as in transformers 5.17
    REFUSED |= {"qwen4_exp"}


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


OPS = {
    "gdn": (flash_delta.fused_recurrent_gated_delta_rule, {"use_qk_l2norm_in_kernel": True}),
    "kda": (flash_delta.fused_recurrent_kda, {"use_qk_l2norm_in_kernel": True}),
    "gdn2": (flash_delta.fused_recurrent_gdn2, {"use_qk_l2norm_in_kernel": True}),
    "gdp": (flash_delta.fused_recurrent_gated_delta_product, {"num_householder": 2}),
}


def arguments(member, B, T):
    """q, k, v and the gates of T tokens, in float32."""
    n, wide = 2 if member == "gdp" else 1, member in ("kda", "gdn2")
    q, k, v = random(B, T, 2, 16), random(B, n * T, 2, 16, seed=1) / 4, random(B, n * T, 4, 16, seed=2)
    gate = random(B, T, 4, 16, seed=3) if wide else random(B, T, 4, seed=3)
    gates = {"g": -gate.abs()}
    gates |= {"b": gate.sigmoid(), "w": v.sigmoid()} if member == "gdn2" else {}
    gates |= {} if member == "gdn2" else {"beta": random(B, n * T, 4, seed=4).sigmoid()}
    return {name: x.float() for name, x in ({"q": q, "k": k, "v": v} | gates).items()}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("member", OPS)
def test_a_state_has_the_bits_of_single_tokens(member, backend):
    """Whatever calls the tokens came in, and wherever they are cut."""
    op, options = OPS[member]
    options |= {"backend": backend, "output_final_state": True, "allow_neg_eigval": False}
    T, given = 5, arguments(member, 2, 5)

    def part(start, end):
        return {name: x.unflatten(1, (T, -1))[:, start:end].flatten(1, 2) for name, x in given.items()}

    start = random(2, 4, 16, 16, seed=5).float()
    single = [start]
    for t in range(T):
        single.append(op(**part(t, t + 1), **options, initial_state=single[-1])[1])
    replay, state = Replay(start), start
    for call in ((0, 1), (1, 4), (4, 5)):
        _, state = replay.run(op, part(*call), options | {"initial_state": state}, Packing())
    assert torch.equal(state, single[T])
    for kept in range(T):
        assert torch.equal(replay.after(kept)[1], single[kept])


PADDING = {
    "none": None,
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "anywhere": [[1, 0, 1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", DELTA_LAYERS)
@torch.no_grad()
def test_a_layer_goes_on_from_a_cropped_state(name, padding):
    """Three calls of 4, 1 and 4 tokens. Any number of the tokens is taken back, and others follow."""
    torch.manual_seed(0)
    layer, x, more = DELTA_LAYERS[name]().double(), random(2, 9, D), random(2, 3, D, seed=1)
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding])

    def run(state, start, end):
        return layer(x[:, start:end], None if mask is None else mask[:, start:end], state)

    for taken in range(10):
        state, expected, snapshots = MixerState(record_past=True), MixerState(), {}
        for start, end in ((0, 4), (4, 5), (5, 9)):
            snapshots[start] = state.recurrent, state.conv
            y = run(state, start, end)
        assert state.croppable == 9
        with pytest.raises(ValueError, match=r"tokens: expected 0 to 9 \(so many are kept .*, got 10"):
            state.crop(10)
        snapshots[9] = state.recurrent, state.conv
        state.crop(taken)
        assert state.croppable == 0
        if (9 - taken) in snapshots and name not in UNEVEN:
            recurrent, conv = snapshots[9 - taken]
            assert (state.conv, state.recurrent) == (None, None) or torch.equal(state.recurrent, recurrent)
            assert all(map(torch.equal, state.conv or (), conv or ()))
        if taken < 9:
            y = run(expected, 0, 9 - taken)
            assert_close(state.recurrent, expected.recurrent)
        y = layer(more, state=state)
        assert_close(y, layer(more, state=expected))


def test_a_crop_outside_of_no_grad_leaves_no_graph():
    layer, x, state = DELTA_LAYERS["gdn"](), random(1, 9, D).float(), MixerState(record_past=True)
    with torch.no_grad():
        layer(x, state=state)
    state.crop(2)
    assert not copy.deepcopy(state).recurrent.requires_grad


@torch.no_grad()
def test_a_call_without_tokens_is_kept_as_nothing():
    layer, x, state, expected = DELTA_LAYERS["gdn"](), random(2, 9, D).float(), MixerState(record_past=True), None
    for start, end in ((0, 4), (4, 4), (4, 9)):
        expected = state.recurrent if end == 9 else None
        layer(x[:, start:end], state=state)
    assert state.croppable == 9
    state.crop(5)
    assert torch.equal(state.recurrent, expected)


@torch.no_grad()
def test_attention_is_cropped():
    layer, x = Attention(hidden_size=D, num_heads=2).double(), random(2, 9, D)
    mask = torch.tensor(PADDING["left"])
    for valid in (None, mask):
        state, expected = AttentionState(), AttentionState()
        layer(x, valid, state=state)
        layer(x[:, :6], valid if valid is None else valid[:, :6], state=expected)
        state.crop(3)
        assert_close(layer(x[:, 6:], state=state), layer(x[:, 6:], state=expected))
    with pytest.raises(ValueError, match=r"tokens: expected 0 to 9 \(so many were seen\), got 10"):
        state.crop(10)


@torch.no_grad()
def test_more_tokens_than_are_kept():
    """The last KEPT of a long call, at least KEPT of many short ones."""
    model, ids = build("gdn"), tokens(1, 2 * KEPT + 40)

    def cropped(n, *pieces):
        cache = FlashDeltaCache(model.config)
        cache.activate_past_recording()
        for piece in pieces:
            model(piece, cache=cache)
        cache.crop(-n)
        kept = ids[:, : cache.get_seq_length()]
        logits = model(ids[:, :3], cache=cache).logits
        assert_close(logits, model(torch.cat([kept, ids[:, :3]], 1), use_cache=False).logits[:, -3:])

    for n in (1, KEPT):
        cropped(n, ids)
        cropped(n, *ids.split(1, dim=1))
        cropped(n, ids[:, :10], ids[:, 10:])
    with pytest.raises(ValueError, match=rf"tokens_to_remove: expected -{KEPT} to 0 .*, got -{KEPT + 1}"):
        cropped(KEPT + 1, ids)
    with pytest.raises(ValueError, match=r"so many are kept since the last crop\), got -290"):
        cropped(290, *ids.split(1, dim=1))


@pytest.fixture
def crops(monkeypatch):
    """For each crop which cache, and how many tokens."""
    found = []
    for cls in (FlashDeltaCache, DynamicCache):

        def crop(self, tokens_to_remove, crop=cls.crop):
            found.append((id(self), -int(tokens_to_remove)))
            crop(self, tokens_to_remove)

        monkeypatch.setattr(cls, "crop", crop)
    return found


def drafting(model, seed=5):
    """A model that is wrong now and then."""
    draft = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.05 * p.abs().mean() * torch.randn_like(p))
    return draft


def assert_drafts_change_nothing(model, prompts, crops):
    """The greedy tokens, with drafts of a model and drafts from the prompt. Some are rejected, and some are not."""
    options = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None}
    for draft in ({"assistant_model": drafting(model)}, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}):
        rejected = []  # in each round
        for prompt in prompts:
            crops.clear()
            text = model.generate(prompt, **options, **draft)
            assert torch.equal(text, model.generate(prompt, **options))
            rejected += [n for cache, n in crops if cache == crops[0][0]]  # an assistant has a cache of its own
            assert text[0, -50:].unique().numel() > 2
        assert max(rejected) > 0
        assert len(rejected) < 50 * len(prompts)  # a round has a token of its own, and the accepted ones


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_generate_with_drafts(kind, crops):
    assert_drafts_change_nothing(build(kind), (tokens(1, 5), tokens(1, LONG)), crops)


@GENERATING
def test_generate_with_drafts_of_transformers(family, crops):
    model = tiny_transformers.build(family, torch.float64)
    with float64(family), enable(model):
        refused = pytest.raises(ValueError, match="assisted generation is not supported with stateful models")
        with refused if family in REFUSED else nullcontext():
            assert_drafts_change_nothing(model, (words(1, 5), words(1, LONG)), crops)


@pytest.mark.parametrize("model", [*KINDS, *(name for name in tiny_transformers.FAMILIES if name != "bailing_hybrid")])
def test_rows_of_a_batch(model):
    """Two rows, of which one is padded. A draft of one call or of single tokens is taken back, or a part of it."""
    ours, family, draw = model in KINDS, model, tokens if model in KINDS else words
    model = build(model) if ours else tiny_transformers.build(model, torch.float64)
    prompt, draft, more = (draw(2, n, seed=n) for n in (9, 5, 4))
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, :4] = prompt[0, :4] = 0
    with nullcontext() if ours else float64(family), nullcontext() if ours else enable():
        for rejected, pieces in ((0, 5), (2, 5), (5, 5), (2, 1), (4, 1), (5, 1)):
            cache = FlashDeltaCache(model.config) if ours else DynamicCache(config=model.config)
            cache.activate_past_recording()
            with torch.no_grad():
                for ids in (prompt, *draft.split(pieces, dim=1)):
                    seen = cache.get_seq_length() + ids.shape[1]
                    model(ids, attention_mask=mask[:, :seen], **{CACHE: cache})
                    cache.crop(0) if ids is prompt else None
                cache.crop(-rejected)
                seen = cache.get_seq_length() + 4
                assert seen == 18 - rejected
                got = model(more, attention_mask=mask[:, :seen], **{CACHE: cache})[0]
                whole = torch.cat([prompt, draft[:, : 5 - rejected], more], dim=1)
                want = model(whole, attention_mask=mask[:, :seen], use_cache=False)[0][:, -4:]
            assert_close(got, want)


def test_errors_of_our_cache():
    model = build("hybrid")
    cache = FlashDeltaCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(tokens(2, 5), cache=cache)
    for wrong in (1, -6, -1.0, "2"):
        with pytest.raises(ValueError, match=rf"tokens_to_remove: expected -5 to 0 .*, got {wrong}$"):
            cache.crop(wrong)
    mixer, x, bounds = model.model.layers[0].mixer, torch.zeros(1, 3, 16).double(), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"cu_seqlens \(or cp_context\): expected None with a state that records"):
        mixer(x, state=cache.layers[0], cu_seqlens=bounds)
    cache.reorder_cache(torch.tensor([1, 0]))  # what was kept is forgotten
    with pytest.raises(ValueError, match=r"expected 0 to 0 \(so many are kept since the last crop\), got -1"):
        cache.crop(-1)
    cache.crop(torch.tensor(0))
    assert (cache.get_seq_length(), cache.is_croppable) == (5, True)
    cache.reset()
    assert (cache.get_seq_length(), cache.is_croppable) == (0, True)
    cache = FlashDeltaCache(model.config)
    model(tokens(2, 5), cache=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"expected 0 to 0 \(without activate_past_recording\(\)\), got -1"):
        cache.crop(-1)


@torch.no_grad()
def test_errors_of_caches_of_transformers():
    model = tiny_transformers.build("qwen3_next")
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()

    def refuses(n, why):
        with pytest.raises(ValueError, match=rf"tokens_to_remove: expected {why}, got {n}"):
            cache.crop(n)

    with enable():
        model(words(2, 5), **{CACHE: cache})
        assert cache.is_croppable
        refuses(-6, r"-5 to 0 \(so many are kept since the last crop\)")
        cache.reorder_cache(torch.tensor([1, 0]))
        refuses(-1, r"0 to 0 \(so many are kept since the last crop\)")
        assert not cache.is_croppable
        linear = model.model.layers[0].linear_attn
        with pytest.raises(ValueError, match="seq_idx: expected None with a cache that records its past, got a tensor"):
            linear(torch.zeros(1, 2, 16), cache, seq_idx=torch.zeros(1, 2, dtype=torch.int32))
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(words(2, 5), **{CACHE: cache})  # by transformers' own code
    with enable():
        refuses(-1, r"0 to 0 \(so many are kept since the last crop\)")


def test_continuous_batching_is_refused():
    """The paged cache of transformers keeps no recurrent state."""
    with pytest.raises(NotImplementedError, match="generate_batch: expected a model whose layers keep keys and values"):
        build("gdn").generate_batch([[3, 4, 5]])


@pytest.mark.parametrize("model", ["gdn", "qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_calls_that_record_nothing(model):
    """After them, a state is not rolled back to what was kept before."""
    ours = model in KINDS
    model = build(model) if ours else tiny_transformers.build(model)
    cache = FlashDeltaCache(model.config) if ours else DynamicCache(config=model.config)
    ids = tokens(2, 5)
    with nullcontext() if ours else enable():
        cache.activate_past_recording()
        model(ids, **{CACHE: cache})
        for layer in cache.layers:
            layer.record_past = False
        model(ids[:, :1], **{CACHE: cache})
        cache.activate_past_recording()
        with pytest.raises(ValueError, match=r"tokens_to_remove: expected 0 to 0 .*, got -1"):
            cache.crop(-1)
        model(ids[:, :3], **{CACHE: cache})
        with pytest.raises(ValueError, match=r"tokens_to_remove: expected -3 to 0 .*, got -4"):
            cache.crop(-4)
        cache.crop(-3)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_a_long_call_whose_first_part_is_one_token(family):
    """It comes after a text that is shorter than the convolution."""
    model, ids = tiny_transformers.build(family, torch.float64), words(1, 2 + KEPT + 1)
    with float64(family), enable():
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids[:, :2], **{CACHE: cache})
        logits = model(ids[:, 2:], **{CACHE: cache})[0]
        assert_close(logits, model(ids, use_cache=False)[0][:, 2:])


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_a_cache_of_transformers_keeps_no_long_text(family):
    model = tiny_transformers.build(family)
    cache = DynamicCache(config=model.config)
    layer = cache.layers[0]
    cache.activate_past_recording()
    with enable():
        model(words(1, 3 * KEPT), **{CACHE: cache})
        for length in (*range(KEPT, 2 * KEPT + 1), *range(KEPT, KEPT + 3)):
            assert layer.conv_states[0].shape[-1] == length + layer.conv_kernel_size[0]
            kept = [part.op["q"] for part in layer.replay.parts]
            assert sum(q.shape[1] for q in kept) == layer.replay.length == length
            assert all(q.untyped_storage().nbytes() == q.nbytes for q in kept)
            model(words(1, 1), **{CACHE: cache})


def test_what_is_lifted_is_put_back():
    module = tiny_transformers.modelling("qwen3_next")
    layer = type(DynamicCache(config=tiny_transformers.build("qwen3_next").config).layers[0])
    before = module.Qwen3NextPreTrainedModel._is_stateful, layer.crop, layer.is_croppable
    with enable() as report:
        assert not module.Qwen3NextForCausalLM._is_stateful
        assert "Qwen3NextPreTrainedModel._is_stateful: True -> False" in str(report)
    assert (module.Qwen3NextPreTrainedModel._is_stateful, layer.crop, layer.is_croppable) == before
    assert before[0] is True


def test_what_is_not_lifted():
    """Drafts would change the text: by attention that chooses other keys for several tokens than for one."""
    cls = tiny_transformers.modelling("glm5_next").Glm5NextPreTrainedModel
    with enable():
        assert cls._is_stateful
