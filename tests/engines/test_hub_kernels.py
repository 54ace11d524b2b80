"""The package of ``make hub``, loaded by Hugging Face's ``kernels`` from a folder, under models of transformers."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_transformers
import torch

if find_spec("kernels") is None:
    pytest.skip("it needs kernels", allow_module_level=True)

from kernels import LocalLayerRepository, Mode, get_kernel, get_local_kernel, kernelize, use_kernel_mapping
from transformers.utils.import_utils import is_kernels_available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.filterwarnings("ignore")
GDN = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
KDA = {"chunk_kda", "fused_recurrent_kda"}
AROUND = {"causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated"}
FAMILIES = sorted(tiny_transformers.FAMILIES)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, ROOT / "hub" / "build.py", out], check=True)
    return out


def give(model, repository, mode):
    """Has `kernelize` give our layers to a model; returns the names of those that it took."""
    if not is_kernels_available():
        pytest.skip("this transformers takes no kernels of this version")
    layers = {name: LocalLayerRepository(repository, layer_name=name) for name in GDN | KDA | AROUND}
    mapping = {name: {DEVICE: {Mode.TRAINING | Mode.TORCH_COMPILE: layer}} for name, layer in layers.items()}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=DEVICE)
    found = {}
    for module in model.modules():
        found |= getattr(module, "_kernel_funcs", None) or {}
        if hasattr(module, "kernel_layer_name"):
            found[module.kernel_layer_name] = module
    ours = get_local_kernel(repository).layers.__name__
    return {name for name, module in found.items() if module.forward.__module__.startswith(ours.split(".")[0])}


def tokens(rows=2, length=33):
    return torch.randint(3, 37, (rows, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def build(family):
    return tiny_transformers.build(family).to(DEVICE)


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_it_is_loaded_by_its_name(repository, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"somebody/flash-delta={repository}")
    package = get_kernel("somebody/flash-delta", version=1)
    assert package is get_local_kernel(repository)
    assert package.__name__.startswith("_flash_delta_universal_")
    q, k, v = torch.randn(3, 1, 70, 2, 16, device=DEVICE)
    call = {"g": -torch.rand_like(k), "beta": torch.rand(1, 70, 2, device=DEVICE), "output_final_state": True}
    call["use_qk_l2norm_in_kernel"] = True
    for a, b in zip(package.chunk_kda(q, k, v, **call), package.fused_recurrent_kda(q, k, v, **call), strict=True):
        close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_inference(repository, family):
    model = build(family)
    generates = hasattr(model, "lm_head")

    @torch.no_grad()
    def run():
        completion = model.generate(tokens()[:, :7], max_new_tokens=6, do_sample=False) if generates else None
        return model(tokens())[0], completion

    logits, completion = run()
    taken = give(model, repository, Mode.INFERENCE)
    assert taken in (GDN | AROUND, KDA | AROUND)
    found, found_completion = run()
    close(found, logits)
    assert not generates or torch.equal(found_completion, completion)


@pytest.mark.parametrize("family", FAMILIES)
def test_training(repository, family):
    def run(model):
        y = model(tokens(), use_cache=False)[0]
        (y * torch.linspace(-1, 1, y.shape[-1], device=DEVICE)).mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    own, ours = build(family).train(), build(family).train()
    expected = run(own)
    assert give(ours, repository, Mode.TRAINING) in (GDN | AROUND, KDA | AROUND)
    found = run(ours)
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values()).item()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_packed_documents(repository, family):
    """Bounds, as `DataCollatorWithFlattening` makes them, reach the layers."""
    model = build(family)
    give(model, repository, Mode.INFERENCE)
    row, bounds = tokens(1, 40), torch.tensor([0, 13, 40], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(13), torch.arange(27)])[None].to(DEVICE)
    longest = {"max_length_q": 27, "max_length_k": 27}
    with torch.no_grad():
        packed = model(
            row, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **longest, use_cache=False
        )[0]
        alone = [model(row[:, part], use_cache=False)[0] for part in (slice(13), slice(13, 40))]
    close(packed, torch.cat(alone, 1))


def test_compiled(repository):
    model = build("qwen3_5")
    with torch.no_grad():
        logits = model(tokens(), use_cache=False)[0]
        assert give(model, repository, Mode.INFERENCE | Mode.TORCH_COMPILE) == GDN | AROUND
        close(torch.compile(model, backend="aot_eager", fullgraph=True)(tokens(), use_cache=False)[0], logits)
