"""Layers and models under torch.compile: one graph, eager's numbers, no compilation for another length."""

from functools import partial

import pytest
import torch
from tiny_layers import LAYERS, D, random
from tiny_model import SIZES, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM

LENGTHS = (40, 64, 71)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compiled(f, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(f, fullgraph=True, dynamic=True, backend=counter), counter


def with_gradients(f, parameters, *args, **options):
    y = f(*args, **options)
    y = getattr(y, "loss", y)
    return [y, *torch.autograd.grad(y.square().sum(), parameters)]


def enable_checkpointing(model):
    """transformers renamed it, and warns of the old name where it has the new one."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


def arguments(kind, T):
    if kind == "packed":
        return {"cu_seqlens": torch.tensor([0, 5, 5, T - 3])}
    if kind == "padded":
        return {"attention_mask": (torch.arange(T) >= torch.tensor([[7], [0]])).long()}
    return {}


@pytest.mark.parametrize(
    ("name", "kind"), [("gdn-grouped", "padded"), ("kda-bounded", "batch"), ("kda", "packed"), ("attention", "packed")]
)
def test_layers(name, kind):
    """Checkpointed where they are plain: the op runs twice then."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    run = layer if kind != "batch" else lambda x: checkpoint(layer, x, use_reentrant=False)
    f, counter = compiled(run)
    for T in LENGTHS:
        x, options = random(1 if kind == "packed" else 2, T, D, seed=T), arguments(kind, T)
        want = with_gradients(layer, list(layer.parameters()), x, **options)
        for a, b in zip(with_gradients(f, list(layer.parameters()), x, **options), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("kind", "mixers", "backend"), [("batch", ["gdn", "kda"], "aot_eager"), ("packed", ["gdn", "attention"], "eager")]
)
def test_models(kind, mixers, backend):
    """With their loss in one graph: a batch under autocast and activation checkpointing, and packed documents."""
    torch.manual_seed(0)
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**SIZES | {"num_hidden_layers": 2}, mixers=mixers)).train()
    if kind == "batch":
        enable_checkpointing(model)
    f, counter = compiled(model, backend)
    for T in LENGTHS:
        ids, options = tokens(1 if kind == "packed" else 2, T, seed=T), arguments(kind, T)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "batch"):
            want = with_gradients(model, list(model.parameters()), ids, labels=ids, **options)
            got = with_gradients(f, list(model.parameters()), ids, labels=ids, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2


@GPU
@pytest.mark.filterwarnings("ignore")  # torch's own: its compiler's deprecations and advice
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_on_a_gpu(checkpointed):
    """Inductor around the kernels, under autocast: the same bits from the same batch, as near to float32 as eager."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_heads": 2, "num_v_heads": 4, "head_dim": 64, "vocab_size": 256}
    model = FlashDeltaForCausalLM(FlashDeltaConfig(**sizes, num_hidden_layers=3, mixers=["gdn", "kda", "gdn"]))
    model = model.cuda().train()
    if checkpointed:
        enable_checkpointing(model)
    f, counter = compiled(model, "inductor")
    for T in (500, 1024, 777):
        ids = torch.randint(256, (2, T), device="cuda")
        parameters = list(model.parameters())
        call = partial(with_gradients, parameters=parameters, labels=ids, use_cache=False)
        truth = call(model, input_ids=ids)
        with torch.autocast("cuda", torch.bfloat16):
            eager, first, second = (call(g, input_ids=ids) for g in (model, f, f))
        for want, near, a, b in zip(truth, eager, first, second, strict=True):
            assert torch.equal(a, b)
            assert (a - want).norm() <= 2 * (near - want).norm() + 1e-3 * want.norm()
    assert counter.frame_count <= 2
