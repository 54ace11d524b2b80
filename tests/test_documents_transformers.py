"""Documents in rows of transformers' models, told by `position_ids` alone: what each gives alone."""

import pytest
import torch

pytest.importorskip("transformers")

from test_integrations_transformers import DENSE, GPU, float64, tokens, with_gradients
from tiny_transformers import FAMILIES, build, modelling
from transformers import DataCollatorWithFlattening, DynamicCache

from flash_delta.integrations.transformers import enable, layers
from flash_delta.models.heads import CACHE
from flash_delta.testing import assert_accurate, relative_error

ROWS = [[3, 1, 1, 2, 66, 9], [9, 66, 2, 1, 1, 3]]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS])
T = POSITIONS.shape[1]
INDEXED = {"glm5_next": {"layer_types": ["linear_attention"] * 2}}  # whose indexed attention keeps nothing apart


def alone(model, x):
    rows = [[model(piece, use_cache=False)[0] for piece in x[b : b + 1].split(ROWS[b], dim=1)] for b in range(len(x))]
    return torch.cat([torch.cat(row, dim=1) for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows(family):
    """Two rows of other documents, and gradients; without the change they are 3 to 8 off."""
    model, x = build(family, torch.float64, **INDEXED.get(family, {})), tokens(2, T)
    with float64(family):
        want = with_gradients(model, alone(model, x))
        with enable(model):
            got = with_gradients(model, model(x, position_ids=POSITIONS, use_cache=False)[0])
    for name in want:
        assert_accurate(name, got[name], want[name], torch.float64)


@torch.no_grad()
def test_evaluation_makes_no_cache_by_itself():
    """Transformers' models make one unless they are told not to, and beside it their attention mixes documents."""
    model, x = build("qwen3_5"), tokens(2, T)
    assert (model.config.use_cache, model.training) == (True, False)
    with enable(model):
        output = model(x, position_ids=POSITIONS)
        assert getattr(output, CACHE) is None
        assert torch.equal(output[0], model(x, position_ids=POSITIONS, use_cache=False)[0])
        assert model(x)[CACHE] is not None


@pytest.mark.parametrize("family", DENSE)
def test_collator(family):
    """Its default form, its `seq_idx` and its bounds say the same."""
    model = build(family, torch.float64)
    documents = [{"input_ids": tokens(n).tolist()} for n in ROWS[0]]
    batches = [
        DataCollatorWithFlattening(**options)(documents)
        for options in ({}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True})
    ]
    with float64(family), enable(model):
        results = [model(**batch, use_cache=False).logits for batch in batches]
        for positions in (POSITIONS[:1][None], POSITIONS[:1][None].expand(4, -1, -1))[: 2 * (family == "qwen3_5")]:
            if positions.shape[0] == 4:  # axes of text, time, height, width
                results.append(model(batches[0]["input_ids"], position_ids=positions, use_cache=False)[0])
    for result in results[1:]:
        assert_accurate("logits", result, results[0], torch.float64)


@pytest.mark.parametrize("family", DENSE)
def test_training(family):
    """A model in training makes no cache by itself; gradient checkpointing runs layers again, with what they knew."""
    model, x = build(family, torch.float64, **DENSE[family]), tokens(2, T)
    with float64(family), enable(model):
        want = with_gradients(model, alone(model, x))
        model.train()
        for options in (None, {"use_reentrant": True}, {"use_reentrant": False}):
            if options is not None:
                name = "activation_checkpointing_enable"
                getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(options)
            got = by_backward(model, model(x, position_ids=POSITIONS)[0])
            for name in want:
                assert_accurate(name, got[name], want[name], torch.float64)


def by_backward(model, y):
    """Returns what `with_gradients` returns, in the way that reentrant checkpointing needs."""
    model.zero_grad()
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y))
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"y": y.detach()} | gradients


@pytest.mark.parametrize("family", DENSE)
def test_compiled(family):
    torch._dynamo.reset()
    model, x = build(family, **DENSE[family]), tokens(2, T)
    with enable(model):
        want = model(x, position_ids=POSITIONS, use_cache=False)[0]
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, position_ids=POSITIONS, use_cache=False)[0], want)


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_what_is_no_start(family, monkeypatch):
    """Left padding, places in pictures and decoding: ops are called as ever."""
    model, x, module = build(family), tokens(2, 9), modelling(family)
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with enable(model), monkeypatch.context() as patch:
        convolve, seen = module.causal_conv1d_fn, []

        def watched(*args, **kwargs):
            seen.append(kwargs.get("seq_idx"))
            return convolve(*args, **kwargs)

        patch.setattr(module, "causal_conv1d_fn", watched)
        mix = layers.mix_layer
        patch.setattr(layers, "mix_layer", lambda *args: seen.append(args[-1]) or mix(*args))
        model(x, attention_mask=mask, position_ids=positions, use_cache=False)
        cache = DynamicCache(config=model.config)
        model(x, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        model(x[:, :1], position_ids=positions[:, :1], **{CACHE: cache})
        model(x[:, :1], position_ids=positions[:, :1], use_cache=False)
        if family == "qwen3_5":
            model(x, position_ids=torch.zeros(3, 2, 9, dtype=torch.long), use_cache=False)
        assert len(seen) >= 3
        assert set(seen) == {None}
        model(x, position_ids=POSITIONS[:, :9], use_cache=False)
        assert seen[-1] is not None
    generated = model.generate(x, attention_mask=mask, max_new_tokens=3, do_sample=False)
    with enable(model):
        assert torch.equal(model.generate(x, attention_mask=mask, max_new_tokens=3, do_sample=False), generated)


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_positions_beside_a_cache(family):
    """They go on where the cache ends, as those that `generate` gives."""
    model, x, positions = build(family, torch.float64), tokens(2, 9), torch.arange(9)[None].expand(2, 9)
    cache = DynamicCache(config=model.config)
    with float64(family), enable(model):
        parts = [
            model(x[:, part], position_ids=positions[:, part], **{CACHE: cache})[0] for part in (slice(6), slice(6, 9))
        ]
        assert_accurate("logits", torch.cat(parts, dim=1), model(x, use_cache=False)[0], torch.float64)


@GPU
@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_restarts_beside_a_cache_on_a_gpu(family):
    """Nobody reads their positions there. Rows are one document each, as in the model's own code."""
    model, x, positions = build(family, **DENSE[family]).cuda(), tokens(2, T).cuda(), POSITIONS.cuda()
    want = model(x, position_ids=positions, use_cache=True)[0]
    with enable(model):
        got = model(x, position_ids=positions, use_cache=True)[0]
        apart = model(x, position_ids=positions, use_cache=False)[0]
    assert relative_error(got, want) < 1e-3 < relative_error(apart, want)


def test_what_is_refused():
    model, x = build("qwen3_5"), tokens(2, T)
    seq_idx = torch.zeros(2, T, dtype=torch.int)
    with enable(model):
        cache = DynamicCache(config=model.config)
        for options in (
            {"use_cache": True},
            {"attention_mask": torch.ones_like(x)},
            {"attention_mask": {"full_attention": None, "linear_attention": torch.ones_like(x)}},
            {"cache": cache},
            {"past_key_values": cache},
        ):
            with pytest.raises(ValueError, match="position_ids: expected one document per row beside a cache or atten"):
                model.model(x, position_ids=POSITIONS, **options)
        with pytest.raises(ValueError, match=r"position_ids: expected positions .* with seq_idx, got None"):
            model(x, seq_idx=seq_idx, use_cache=False)
        with pytest.raises(ValueError, match="seq_idx: expected None with a cache or attention_mask"):
            model(x, seq_idx=seq_idx, position_ids=POSITIONS, use_cache=True)
        model.model.forward = model.model.forward  # as hooks do
        with pytest.raises(ValueError, match="model: model: expected the forward of its class"):
            enable(model)
    if "glm5_next" in FAMILIES:
        model = build("glm5_next")
        with (
            enable(model),
            pytest.raises(ValueError, match=r"position_ids: .* Glm5NextTextModel mixes a row's documents"),
        ):
            model(x, position_ids=POSITIONS, use_cache=False)
