"""Models of transformers on this library's ops: what their own code computes, in float64 to the last digits."""

import inspect
import sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from tiny_transformers import COMMON, FAMILIES, build, modelling
from transformers import DynamicCache

from flash_delta.integrations.transformers import disable, enable, functions, layers
from flash_delta.integrations.transformers import enabling as integration
from flash_delta.models.heads import CACHE
from flash_delta.reference import backend
from flash_delta.testing import allowed, assert_accurate, relative_error

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FAMILY = pytest.mark.parametrize("family", FAMILIES)
DENSE = {  # no expert that a rounding may choose, and heads that a kernel takes
    "qwen3_5": {"linear_key_head_dim": 16},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 1, "mlp_layer_types": ["dense", "dense"]},
}
GENERATING = pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name][1].endswith("CausalLM")])


@contextmanager
def float64(family):
    """Models of this family compute in float64 where their code says float32: the truth, and no copy of that code."""
    module = modelling(family)
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", wide)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def tokens(*shape, seed=0):
    return torch.randint(3, COMMON["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def linear_layer(model):
    return next(layer for layer in model.modules() if hasattr(layer, "conv1d"))


def with_gradients(model, y):
    """What a model returned, and the gradients of all its parameters."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, parameters, dy.to(y), allow_unused=True, materialize_grads=True)
    return {"y": y.detach()} | dict(zip(names, gradients, strict=True))


def assert_equal_in_float64(family, model, run):
    """``run`` on this library against ``run`` on the model's own code."""
    with float64(family):
        want = with_gradients(model, run())
        with enable(model):
            got = with_gradients(model, run())
    for name in want:
        assert_accurate(name, got[name], want[name], torch.float64)


@FAMILY
def test_how_large_beta_can_be(family, monkeypatch):
    """What the ops are told about beta is right for the largest ones that the model's code makes."""
    seen, doubled = [], family == "olmo_hybrid"
    for name in ("forward", "step"):
        run = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda p, x, *more, run=run: seen.append((p, x.beta)) or run(p, x, *more))
    model = build(family, **({"linear_allow_neg_eigval": True} if doubled else {}))
    with torch.no_grad(), enable(model):
        for name, projection in model.named_modules():
            if name.endswith(("in_proj_ba", "in_proj_b", "b_proj")):
                projection.weight *= 1000
        cache = model(tokens(8, 9), use_cache=True)[CACHE]
        model(tokens(8, 1), **{CACHE: cache}, use_cache=True)
    assert [p.recurrent for p, _ in seen] == [False, True]
    for problem, beta in seen:
        assert problem.most_beta == (2 if doubled else 1)
        assert beta.max() == problem.most_beta


@FAMILY
def test_logits_and_gradients(family):
    model = build(family, torch.float64)
    assert_equal_in_float64(family, model, lambda: model(tokens(2, 70))[0])


@pytest.fixture
def mixed(monkeypatch):
    """The layers that run as one op, one entry per call."""
    seen, run = [], layers.mix_layer
    monkeypatch.setattr(layers, "mix_layer", lambda layer, *args: seen.append(layer) or run(layer, *args))
    return seen


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "bailing_hybrid"])
def test_a_layer_mixes(family, mixed):
    """Without a cache everything between the projections is one op, if nothing of it has been changed."""
    model = build(family, torch.float64)
    layer, x = linear_layer(model), tokens(2, 9)

    def run(**options):
        del mixed[:]
        return model(x, use_cache=False, **options)[0].detach(), len(mixed)

    with float64(family), enable(model):
        want, count = run()
        assert count == 1
        if family not in ("qwen4_exp", "glm5_next"):  # their attention mixes documents
            assert run(seq_idx=torch.zeros_like(x), position_ids=torch.arange(9).expand(2, 9))[1] == 0
        del mixed[:]
        model(x, use_cache=True)
        assert mixed == []
        norm = layer.o_norm if hasattr(layer, "o_norm") else layer.norm
        for part in (norm, layer.conv1d):
            with_hook = part.register_forward_hook(lambda *_: None)
            got, count = run()
            assert count == 0
            assert_accurate("y", got, want, torch.float64)
            with_hook.remove()
        assert torch.equal(run()[0], want)


def test_a_subclass_keeps_its_method(mixed):
    """A layer whose class replaces a method that the known forward pass calls is not the known layer."""
    model, x = build("qwen3_next", torch.float64), tokens(2, 9)
    layer, base = linear_layer(model), modelling("qwen3_next").Qwen3NextGatedDeltaNet

    class Other(base):
        def fix_query_key_value_ordering(self, *projected):
            return super().fix_query_key_value_ordering(*projected)

    with float64("qwen3_next"), enable(model):
        want = model(x, use_cache=False)[0]
        layer.__class__ = Other
        assert_accurate("y", model(x, use_cache=False)[0], want, torch.float64)
    assert len(mixed) == 1


@FAMILY
def test_left_padding(family):
    model = build(family, torch.float64)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :9] = 0
    assert_equal_in_float64(family, model, lambda: model(tokens(2, 70), attention_mask=mask)[0])


@FAMILY
def test_cache(family):
    """A prompt shorter than the convolution, three tokens one by one, a long continuation, one more token."""
    model = build(family, torch.float64)
    pieces = tokens(2, 3 + 3 + 70 + 1).split([3, 1, 1, 1, 70, 1], dim=1)

    def run():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            return [model(piece, **{CACHE: cache})[0] for piece in pieces]

    with float64(family):
        want = run()
        with enable(model):
            got = run()
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_accurate(f"piece {index}", a, b, torch.float64)


@GENERATING
@pytest.mark.parametrize("cache", [None, "static"])
def test_generated_tokens(family, cache):
    """Left-padded prompts; what is chosen among is not a matter of rounding in float64.

    For a static cache `generate` makes a dict of masks.
    """
    model = build(family, torch.float64)
    x = tokens(2, 9)
    mask = torch.ones_like(x)
    x[0, :4] = mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    with float64(family):
        want = model.generate(x, **options)
        with enable(model):
            got = model.generate(x, **options)
    assert got.shape[1] > 9
    assert torch.equal(got, want)


LENGTHS = [3, 70, 1, 20]
PACKING = {
    "cu_seq_lens_q": torch.tensor([0, 3, 73, 74, 94], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 73, 74, 94], dtype=torch.int32),
    "max_length_q": 70,
    "max_length_k": 70,
    "seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int(),
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
}


@FAMILY
def test_packed(family):
    """Sequences in one row give what they give alone, which the model's own code needs fla for."""
    # GLM-5-Next's indexed attention pools keys over the bounds of sequences: its linear layers alone.
    model = build(family, torch.float64, **{"layer_types": ["linear_attention"] * 2} if family == "glm5_next" else {})
    x = tokens(1, 94)
    with float64(family):
        alone = torch.cat([model(piece, use_cache=False)[0] for piece in x.split(LENGTHS, dim=1)], dim=1)
        want = with_gradients(model, alone)
        with enable(model):
            got = with_gradients(model, model(x, use_cache=False, **PACKING)[0])
    for name in want:
        assert_accurate(name, got[name], want[name], torch.float64)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_packing_that_is_refused(family):
    model = build(family)
    with enable(model):
        cache = DynamicCache(config=model.config)
        model(tokens(1, 94), **{CACHE: cache}, **PACKING)
        with pytest.raises(ValueError, match="initial_state: expected None with packed sequences"):
            model(tokens(1, 94), **{CACHE: cache}, **PACKING)
        with pytest.raises(ValueError, match="expected more than 4 packed tokens"):
            model(tokens(1, 3), cu_seq_lens_q=torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_accuracy(family, dtype, device):
    """No further from float64 than twice a layer's own code is, which is what `testing.allowed` says of kernels.

    The median of five: one token whose output is small before its norm can carry most of a gradient's error.
    """
    if device == "cuda":
        torch.use_deterministic_algorithms(False)  # which cuBLAS refuses without a variable of its environment
    errors = [errors_of_layer(family, dtype, device, seed) for seed in range(5)]
    for name in errors[0]:
        own, ours = (sorted(draw[name][which] for draw in errors)[2] for which in (0, 1))
        assert ours <= allowed(own, dtype), name


def errors_of_layer(family, dtype, device, seed):
    """Returns the errors of a linear attention layer's output and gradients: those of its own code, and those of
    ours."""
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_head_dim": 32}
    layer = linear_layer(build(family, torch.float64, hidden_size=64, **heads)).to(dtype)
    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    own = with_gradients(layer, layer(x))
    with enable(layer):
        got = with_gradients(layer.to(device), layer(x.to(device)))
    with float64(family):
        want = with_gradients(layer.cpu().double(), layer(x.double()))
    return {name: tuple(relative_error(y[name], want[name]) for y in (own, got)) for name in want}


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_gradients_through_the_cache(family):
    """A convolution's gradients are right while its window moves on in place, token by token."""
    fn, update = (integration.CONVOLUTIONS[name] for name in ("causal_conv1d_fn", "causal_conv1d_update"))
    module = modelling(family)
    for T, L in ((1, 4), (1, 9), (3, 4)):  # a state of more than W tokens is one of assisted generation
        results = []
        for step in (module.causal_conv1d_update, update):
            x, weight = (
                torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 6, 12), (6, 4))
            )
            leaves = x.double().requires_grad_(), weight.double().requires_grad_()
            state = leaves[0][..., :L].clone()
            ys = [step(piece, state, leaves[1], activation="silu") for piece in leaves[0][..., L : L + 3].split(T, -1)]
            results.append([torch.cat(ys, -1), state, *torch.autograd.grad(torch.cat(ys, -1).square().sum(), leaves)])
            whole = fn(leaves[0], leaves[1], activation="silu", output_router_logits=True)
            results[-1].append(whole)
        for name, got, want in zip(("y", "state", "dx", "dweight", "whole"), *reversed(results), strict=True):
            assert_accurate(name, got, want, torch.float64)
        assert_accurate("y", results[0][0], whole[..., L : L + 3], torch.float64)


def test_report_and_restoring():
    family = "qwen3_5"
    module = modelling(family)
    norm, layer = module.Qwen3_5RMSNormGated, module.Qwen3_5GatedDeltaNet
    owners = module, norm, layer, module.Qwen3_5TextModel, module.Qwen3_5PreTrainedModel
    before, path = {owner: dict(vars(owner)) for owner in owners}, list(sys.meta_path)
    with enable() as first, enable() as second, enable(build(family)):
        mine = [entry for entry in first.replaced if entry.module == module.__name__]
        assert [(entry.owner, entry.name) for entry in mine] == [
            (module, "torch_chunk_gated_delta_rule"),
            (module, "torch_recurrent_gated_delta_rule"),
            (module, "causal_conv1d_fn"),
            (module, "causal_conv1d_update"),
            (norm, "forward"),
            (layer, "forward"),
            (module.Qwen3_5TextModel, "forward"),
            (module.Qwen3_5PreTrainedModel, "_is_stateful"),
        ]
        for owner, name, old, new in mine:
            assert getattr(owner, name) is new
            assert old is before[owner][name]
        assert second.replaced == first.replaced  # what is enabled is not enabled again
        assert first.refused == ()
        assert f"  {module.__name__}\n" in str(first)
        assert "Qwen3_5RMSNormGated.forward: Qwen3_5RMSNormGated.forward of transformers -> gated_norm of fl" in str(
            first
        )
    assert ({owner: dict(vars(owner)) for owner in owners}, list(sys.meta_path)) == (before, path)
    with enable():
        enable()
    assert first.replaced == ()
    enable()
    with enable():
        pass
    assert first.replaced
    module.causal_conv1d_fn, others = print, module.causal_conv1d_fn
    disable()
    disable()
    assert module.causal_conv1d_fn is print  # which somebody has bound after us
    module.causal_conv1d_fn = before[module]["causal_conv1d_fn"]
    assert others is integration.CONVOLUTIONS["causal_conv1d_fn"]
    assert ({owner: dict(vars(owner)) for owner in owners}, list(sys.meta_path)) == (before, path)


def test_refusals(monkeypatch):
    module = modelling("qwen3_5")
    with pytest.raises(
        ValueError, match=r"model: expected layers that call torch_chunk_gated_delta_rule.*got a Linear without"
    ):
        enable(torch.nn.Linear(2, 2))
    assert integration._finder not in sys.meta_path
    model = build("qwen3_5")
    norm = linear_layer(model).norm
    norm.forward = norm.forward  # as hub kernels do
    with pytest.raises(ValueError, match=r"model: model.layers.0.linear_attn.norm: expected the forward of its class"):
        enable(model)
    norm._old_forward = norm.__dict__.pop("forward")  # as accelerate does
    with pytest.raises(ValueError, match=r"enable\(\) before the model is made"):
        enable(model)

    def changed(query, key, value, decay, beta):
        raise NotImplementedError

    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", changed)
    reason = "torch_recurrent_gated_delta_rule: expected arguments among query, .*, in this order, got query, .*decay"
    with pytest.warns(RuntimeWarning, match=reason):
        report = enable()
    with report:
        assert module.__name__ not in {entry.module for entry in report.replaced}
        assert f"  refused: {module.__name__}: torch_recurrent_gated_delta_rule: expected" in str(report)
        with pytest.raises(ValueError, match=reason):
            enable(build("qwen3_5"))
        assert enable().refused == report.refused  # and warned of once
    assert integration._finder not in sys.meta_path
    monkeypatch.setattr(integration.metadata, "version", lambda name: "5.16.2.dev0")
    with pytest.raises(ImportError, match=r"transformers: expected version >= 5.17, got 5.16.2.dev0"):
        enable()


def test_functions_of_hub_kernels(monkeypatch):
    """With `kernels` installed a name stands for a module, whose forward says the function's arguments."""
    module = modelling("qwen3_5")
    function = inspect.signature(module.causal_conv1d_fn)

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise NotImplementedError

    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *function.parameters.values()]
    Func.forward.__signature__ = inspect.Signature(own)
    monkeypatch.setattr(module, "causal_conv1d_fn", Func())
    with enable(build("qwen3_5")) as report:
        assert "causal_conv1d_fn: test_functions_of_hub_kernels.<locals>.Func of test_integ" in str(report)


def test_compiled():
    model = build("qwen3_5")
    with enable(model):
        want = model(tokens(2, 70), use_cache=False)[0]
        got = torch.compile(model, fullgraph=True, backend="eager")(tokens(2, 70), use_cache=False)[0]
    assert torch.equal(got, want)


def test_errors_are_those_of_the_ops():
    model = build("qwen3_5", hidden_act="gelu")
    with enable(model), pytest.raises(ValueError, match="activation: expected 'silu' or None, got 'gelu'"):
        model(tokens(1, 9))


COPY = """
import torch
def torch_chunk_gated_delta_rule(query, key, value, g, beta, initial_state=None, **kwargs): raise NotImplementedError
class Layer(torch.nn.Module):
    def forward(self, q, v, g): return torch_chunk_gated_delta_rule(q, q, v, g, beta=g.exp())[0]
"""


def test_modules_of_others(monkeypatch):
    """Code that calls the ops by transformers' names, as remote code may: only if its model is given."""
    copy = ModuleType("a_copy")
    monkeypatch.setitem(sys.modules, "a_copy", copy)
    exec(COPY, vars(copy))
    old, layer, x = copy.torch_chunk_gated_delta_rule, copy.Layer(), (*torch.ones(2, 1, 3, 1, 8), -torch.ones(1, 3, 1))
    with enable():
        assert copy.torch_chunk_gated_delta_rule is old
        with enable(torch.nn.Sequential(layer)):
            assert layer(*x).shape == (1, 3, 1, 8)
    assert copy.torch_chunk_gated_delta_rule is old


def test_import_after_enable(monkeypatch):
    """A module that is imported later is ours from its first line on; and what imported it is not to be seen."""
    name, package = (
        "transformers.models.olmo_hybrid.modeling_olmo_hybrid",
        import_module("transformers.models.olmo_hybrid"),
    )
    monkeypatch.setattr(package, "modeling_olmo_hybrid", import_module(name))
    monkeypatch.delitem(sys.modules, name)
    with enable() as report:
        module = import_module(name)
        assert [entry.name for entry in report.replaced if entry.owner is module] == [
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "causal_conv1d_fn",
            "causal_conv1d_update",
        ]
        assert module.causal_conv1d_fn is integration.CONVOLUTIONS["causal_conv1d_fn"]
        assert module.OlmoHybridRMSNormGated.forward is integration.gated_norm
        assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert module.causal_conv1d_fn.__module__ == module.OlmoHybridRMSNormGated.forward.__module__ == name
    monkeypatch.delitem(sys.modules, name)
    assert import_module(name).causal_conv1d_fn.__module__ == name


def test_report_of_what_is_not_imported(monkeypatch):
    for name in [name for name in sys.modules if integration.MODELLING.fullmatch(name)]:
        monkeypatch.delitem(sys.modules, name)
    with enable() as report:
        first, *rest = str(report).splitlines()
        assert first.endswith(": nothing is replaced so far")
        assert rest == ["  modelling code that is not imported yet is changed when it is"]
    assert str(report).splitlines()[1:] == ["  disabled"]


@pytest.mark.parametrize("family", DENSE)
def test_kernels(family, monkeypatch):
    """A prompt and a token on the kernels; in Triton's interpreter, where there is no GPU."""
    pytest.importorskip("triton")
    model = build(family, **DENSE[family])
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def run():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            prompt = tokens(2, 10)[1:]  # of the first one every float32 code is 20 times as far off as of others
            pieces = prompt.to(model.device).split([9, 1], dim=1)
            return torch.cat([model(piece, **{CACHE: cache})[0] for piece in pieces], dim=1)

    own = run()
    with float64(family):
        model.double()
        want = run()
    model.to(device, torch.float32)
    with enable(model):
        monkeypatch.setenv("FLASH_DELTA_BACKEND", "triton")
        torch.use_deterministic_algorithms(device == "cpu")
        got = run()
    assert relative_error(got, want) <= allowed(relative_error(own, want), torch.float32)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_chunks_of_any_size(name):
    """transformers' functions take a size that these ops do not have. It changes no result."""
    rule, wide = getattr(functions, name), name == "chunk_kda"
    q, k, v = torch.randn(3, 1, 20, 2, 16).unbind()
    call = partial(rule, q, k, v, -torch.rand(1, 20, 2, *[16] * wide), torch.rand(1, 20, 2))
    assert all(torch.equal(call(chunk_size=size)[0], call()[0]) for size in (4, 100))
    with pytest.raises(ValueError, match="chunk_size: expected one of"):
        call(chunk_size=0)
