"""`install`: this library under fla's names where there is no fla."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_delta
from flash_delta.integrations.fla import install, register, uninstall
from flash_delta.integrations.fla.layers import utils
from flash_delta.integrations.fla.layers.utils import get_unpad_data, index_first_axis, pad_input, unpad_input
from flash_delta.ops._elementwise import Elementwise
from flash_delta.ops._function import DeltaRule


@pytest.fixture
def fla():
    if "fla" in sys.modules or importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed")
    install()
    yield importlib.import_module("fla")
    uninstall()


OF_TRAINERS = [  # what Megatron-Core, torchtitan, axolotl, LLaMA-Factory, ms-swift and verl import
    ("fla.modules.convolution", "causal_conv1d"),
    ("fla.modules.conv", "causal_conv1d"),
    ("fla.modules.conv.causal_conv1d", "causal_conv1d"),
    ("fla.modules.conv.triton.ops", "CausalConv1dFunction"),
    ("fla.modules.convolution", "causal_conv1d_bwd"),
    ("fla.modules.convolution", "causal_conv1d_fwd"),
    ("fla.modules.l2norm", "l2norm"),
    ("fla.modules.l2norm", "l2norm_bwd"),
    ("fla.modules.l2norm", "l2norm_fwd"),
    ("fla.modules", "FusedRMSNormGated"),
    ("fla.modules", "ShortConvolution"),
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    ("fla.ops.gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction"),
    ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_bwd"),
    ("fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule_fwd"),
    ("fla.ops.gated_delta_rule.fused_recurrent", "FusedRecurrentFunction"),
    ("fla.ops.cp.comm", "conv_cp_send_recv_bwd"),
    ("fla.ops.cp.comm", "conv_cp_send_recv_fwd"),
    ("fla.ops.cp.context", "build_cp_context"),
    ("fla.ops.kda", "chunk_kda"),
    ("fla.ops.kda", "fused_recurrent_kda"),
    ("fla.ops.kda.gate", "fused_kda_gate"),
    ("fla.layers.utils", "get_unpad_data"),
    ("fla.layers.utils", "index_first_axis"),
    ("fla.layers.utils", "pad_input"),
]


@pytest.mark.parametrize(("module", "name"), OF_TRAINERS, ids=lambda x: x)
def test_names_of_trainers(fla, module, name):
    space = {}
    exec(f"from {module} import {name}", space)
    assert callable(space[name])


def test_they_are_our_own(fla):
    assert fla.ops.chunk_kda is importlib.import_module("fla.ops.kda.chunk").chunk_kda
    assert inspect.unwrap(fla.ops.chunk_kda) is flash_delta.chunk_kda
    assert fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction is DeltaRule
    assert fla.modules.conv.triton.ops.CausalConv1dFunction is Elementwise
    assert not {"install", "register"} & vars(fla).keys()
    layer = fla.layers.GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=16)
    layer(torch.randn(1, 5, 32))[0].sum().backward()
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    o, _ = fla.ops.chunk_delta_rule(q, q, q, torch.rand(1, 5, 2))
    assert type(o.grad_fn).__name__ == f"{DeltaRule.__name__}Backward"  # the class that a trainer registers


def test_the_version(fla):
    assert fla.__version__ == "0.6.0"
    assert importlib.util.find_spec("fla") is fla.__spec__
    for name in ("flash-linear-attention", "flash_linear_attention", "fla-core"):
        assert importlib.metadata.version(name) == "0.6.0"
    assert set(importlib.metadata.packages_distributions()["fla"]) == {"flash-linear-attention", "fla-core"}
    assert importlib.metadata.version("torch").split("+")[0] == torch.__version__.split("+")[0]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("fla-of-nobody")
    assert importlib.metadata.files("fla-core") is None
    assert importlib.metadata.requires("fla-core") is None


def test_transformers_asks(fla):
    ask = pytest.importorskip("transformers.utils.import_utils")._is_package_available
    assert ask("fla", return_version=True) == (True, "0.6.0")


ABSENT = [
    ("from fla.ops import chunk_gla", ModuleNotFoundError, "fla.ops.chunk_gla"),
    ("from fla.ops.kda.chunk import chunk_kda_fwd", ModuleNotFoundError, "fla.ops.kda.chunk.chunk_kda_fwd"),
    ("import fla.models", ModuleNotFoundError, "fla.models"),
    ("from fla.ops.cp import send_recv_fwd", ModuleNotFoundError, "fla.ops.cp.send_recv_fwd"),
    ("import fla; fla.ops.chunk_gla", AttributeError, "fla.ops.chunk_gla"),
]


@pytest.mark.parametrize(("code", "kind", "name"), ABSENT, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_absent_is_said(fla, code, kind, name):
    call = r"flash_delta.integrations.fla.register\(\)"
    with pytest.raises(kind, match=rf"^{name}: flash_delta stands in for fla 0.6.0 here .* {call} in place of"):
        exec(code, {})
    assert not hasattr(fla.ops, "chunk_gla")


def test_twice_and_back(fla):
    install()
    with pytest.raises(ImportError, match=r"got what install\(\) put in its place"):
        register()
    uninstall()
    uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "fla"]
    with pytest.raises(ModuleNotFoundError, match="No module named 'fla'"):
        importlib.import_module("fla")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("fla-core")


def test_not_where_fla_is(tmp_path, monkeypatch):
    if "fla" in sys.modules:
        pytest.skip("fla is imported")
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("__version__ = '0.6.0'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"expected no fla, got .*__init__.py: register\(\) makes it run"):
        install()
    assert "fla" not in sys.modules


def test_rows_without_padding():
    torch.manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    x = torch.randn(2, 4, 3, requires_grad=True)
    indices, bounds, longest = get_unpad_data(mask)
    assert (indices.tolist(), bounds.tolist(), longest) == ([1, 2, 3, 6, 7], [0, 3, 5], 3)
    assert bounds.dtype == torch.int32
    rows = index_first_axis(x.flatten(0, 1), indices)
    padded = pad_input(rows, indices, 2, 4)
    assert torch.equal(padded, x * mask[..., None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand(2, 4, 3).float())
    q, (k,), of_q, (a, b), lengths = unpad_input(x, (x,), mask, 4)
    assert torch.equal(q, rows)
    assert torch.equal(k, rows)
    assert torch.equal(of_q, indices)
    assert a is b
    assert lengths == (3, 3)
    (q,), (k,), of_q, (a, b), lengths = unpad_input((x[:, :1],), (x,), mask, 1, keepdim=True)
    assert (q.shape, k.shape, of_q.tolist(), a.tolist(), lengths) == ((1, 2, 3), (1, 5, 3), [0, 1], [0, 1, 2], (1, 3))
    with pytest.raises(ValueError, match="unpad_input: q_len: expected 4, the length of states, or 1, got 2"):
        unpad_input(x[:, :2], (x,), mask, 2)
    with pytest.raises(ValueError, match="get_unpad_data: attention_mask: expected a tensor"):
        get_unpad_data(mask[0])


def test_hidden_states_without_padding():
    mask, x = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]), torch.randn(2, 3, 5)
    rows, indices, bounds = utils.unpad_hidden_states(x, None, mask, 3)
    assert torch.equal(rows, torch.cat([x[0], x[1, 1:]])[None])
    assert (indices.tolist(), bounds.tolist()) == ([0, 1, 2, 4, 5], [0, 3, 5])
    assert torch.equal(utils.repad_hidden_states(rows, indices, 2, 3), x * mask[:, 1:, None])
    for given in ((bounds, mask), (None, None)):
        same, none, cu_seqlens = utils.unpad_hidden_states(x, *given, 3)
        assert (same is x, none, cu_seqlens) == (True, None, given[0])
        assert utils.repad_hidden_states(same, none, 2, 3) is x


def test_a_cache_of_layers():
    class Cache(list):
        def update(self, **given):
            self.append(given)
            return given

    layer, cache = torch.nn.Linear(1, 1), Cache()
    assert utils.get_layer_cache(layer, None) is utils.update_layer_cache(layer, None) is None
    with pytest.raises(ValueError, match="Linear: layer_idx: expected a number if the layer is called with past_key"):
        utils.get_layer_cache(layer, cache)
    layer.layer_idx = 0
    assert utils.get_layer_cache(layer, cache) is None
    given = utils.update_layer_cache(layer, cache, recurrent_state=1, offset=4)
    assert given == {"recurrent_state": 1, "conv_state": None, "layer_idx": 0, "offset": 4}
    assert utils.get_layer_cache(layer, cache) is given


MODELS = """
import inspect, sys
import torch
from flash_delta.integrations.transformers.functions import RULES
from flash_delta.integrations.fla import install

install()
from tiny_transformers import build, modelling  # these modules ask for fla while they are imported


def run(model):
    model.zero_grad()
    y = model(torch.arange(3, 33).view(2, 15) % 37, use_cache=False).logits
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


for family in ("qwen3_5", "kimi_linear"):
    module, model = modelling(family), build(family)
    found = run(model)
    for name in RULES.keys() & vars(module).keys():
        theirs = getattr(module, name)
        ours = inspect.getclosurevars(theirs).nonlocals["implementation"]
        assert ours.__module__.startswith("flash_delta.ops"), ours
        setattr(module, name, theirs.__wrapped__)
    for a, b in zip(found, run(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
"""


def test_models_of_transformers():
    """Their modelling code takes the rule from fla wherever it can be imported."""
    pytest.importorskip("transformers")
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", MODELS], check=True, env=os.environ | {"PYTHONPATH": paths})
