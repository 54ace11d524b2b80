"""fla's layers with their default widths on a GPU: rows, padded and packed; gradients; a prompt and then tokens.

In bfloat16, beside the same layer in float64, which `test_fla_layers.py` compares with equations token by token.
"""

import copy

import pytest
import torch
from test_fla_layers import States

from flash_delta.integrations.fla import layers
from flash_delta.testing import allowed, relative_error

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

NAMES = ["GatedDeltaNet", "KimiDeltaAttention", "DeltaNet", "Comba", "SimpleGatedLinearAttention"]
T = 200
LAYOUTS = ["rows", "padded", "packed"]


def build(name):
    """The layer on the GPU, in float64, and in bfloat16 in plain PyTorch."""
    torch.manual_seed(0)
    layer = getattr(layers, name)(layer_idx=0).bfloat16()
    wide, plain = (copy.deepcopy(layer) for _ in range(2))
    for one in (wide, plain):
        for module in one.modules():
            if hasattr(module, "backend"):
                module.backend = "torch"
    return layer.cuda(), wide.double(), plain


def arguments(layout, device):
    if layout == "padded":
        mask = torch.ones(2, T, dtype=torch.long, device=device)
        mask[0, :9], mask[1, 150:] = 0, 0
        return {"attention_mask": mask}
    return {"cu_seqlens": torch.tensor([0, 3, 3, 130, T], device=device)} if layout == "packed" else {}


def results(layer, x, dy, layout):
    x = x.clone().requires_grad_()
    y, _, _ = layer(x, **arguments(layout, x.device))
    # The gradient of Comba's `decay` is 0 except for rounding: there is nothing to compare.
    names = [name for name, p in layer.named_parameters() if name != "decay"]
    leaves = [dict(layer.named_parameters())[name] for name in names]
    return dict(zip(["y", "x", *names], [y, *torch.autograd.grad(y, [x, *leaves], dy)], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_training(name, layout):
    layer, wide, plain = build(name)
    rows = 1 if layout == "packed" else 2
    x, dy = (torch.randn(rows, T, layer.hidden_size).bfloat16() for _ in range(2))
    truth = results(wide, x.double(), dy.double(), layout)
    reference = results(plain, x, dy, layout)
    for key, got in results(layer, x.cuda(), dy.cuda(), layout).items():
        limit = allowed(relative_error(reference[key], truth[key]), torch.bfloat16)
        assert relative_error(got.cpu(), truth[key]) <= limit, key


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_prompt_and_then_tokens(name):
    layer, wide, plain = build(name)
    x = torch.randn(2, T, layer.hidden_size).bfloat16()
    truth, reference = wide(x.double())[0], plain(x)[0]
    cache, parts = States(), []
    for start, stop in [(0, 150), (150, 190), *((t, t + 1) for t in range(190, T))]:
        y, _, _ = layer(x[:, start:stop].cuda(), past_key_values=cache, use_cache=True)
        parts.append(y.cpu())
    assert relative_error(torch.cat(parts, 1), truth) <= allowed(relative_error(reference, truth), torch.bfloat16)
