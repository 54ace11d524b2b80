"""Small linear attention layers of transformers, which trainers change.

``python trained_layers.py FILE`` writes the truth of their tests: what transformers' own PyTorch code computes.
"""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from unittest import mock

import torch

BOUNDS = [0, 13, 40, 70]
COMMON = {"hidden_size": 64, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_conv_kernel_dim": 4}
GDN = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
KDA = {"num_heads": 2, "head_dim": 16}
LAYERS = {  # by family: the configuration's class, the layer's, its sizes
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", GDN),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", GDN),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", GDN),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention", KDA),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextLinearAttention", KDA),
}


def modelling(family="qwen3_5"):
    return import_module(f"transformers.models.{family}.modeling_{family}")


def pretend_gpu(patch):
    """For transformers 5.5, which takes fla only where there is a GPU. Call it before modelling code is imported."""
    patch.setattr("transformers.utils.import_utils.is_torch_cuda_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def build(family="qwen3_5"):
    """The layer in float32, with gates and taps that are not nearly flat."""
    config_class, layer_class, sizes = LAYERS[family]
    config_class = getattr(import_module(f"transformers.models.{family}.configuration_{family}"), config_class)
    torch.manual_seed(0)
    config = config_class(**COMMON, **{f"linear_{name}": size for name, size in sizes.items()})
    layer = getattr(modelling(family), layer_class)(config, layer_idx=0)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-2, 1)
            elif name.endswith("dt_bias"):
                p.uniform_(-3, 0)
            elif name.startswith("conv1d"):
                p.normal_(0, 0.4)
            elif "proj" in name:
                p.mul_(4)
    return layer


def tensors(kind):
    """Inputs and what the loss multiplies outputs by: of a batch of two rows, or of three documents in one row."""
    gen = torch.Generator().manual_seed(1)
    return torch.randn(2, 1 if kind == "packed" else 2, BOUNDS[-1], COMMON["hidden_size"], generator=gen)


def positions():
    return torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]


def train(layer, kind, own=slice(None), **arguments):
    """The output, and the gradients of the input and of all parameters, by name. This library has to run the rule.
    ``own``: which tokens of the rows."""
    from flash_delta.reference import backend

    x, weights = tensors(kind)[:, :, own]
    with mock.patch.object(backend, "backward", wraps=backend.backward) as backward:
        found = _results(layer, x, weights, lambda x: layer(x, **arguments))
    assert backward.called
    return found


def _results(layer, x, weights, run):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    (y * weights).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad} | found


def write(path):
    """By family and kind. Documents one by one: transformers' own code does not keep them apart."""
    sys.modules["fla"], truth = None, {}
    for family in LAYERS:
        if find_spec(f"transformers.models.{family}") is None:
            continue
        layer = build(family)
        for kind in ("batch", "packed"):
            cuts = list(pairwise(BOUNDS)) if kind == "packed" else [(0, BOUNDS[-1])]
            run = lambda x, cuts=cuts, layer=layer: torch.cat([layer(x[:, a:b]) for a, b in cuts], 1)  # noqa: E731
            truth[family, kind] = _results(layer, *tensors(kind), run)
    torch.save(truth, path)


def read_truth(folder):
    path = str(folder / "truth.pt")
    subprocess.run([sys.executable, "-W", "ignore", __file__, path], check=True)
    return torch.load(path)


def assert_close(found, truth, error=2e-5):
    """By the relative L2 error of each tensor."""
    assert found.keys() == truth.keys()
    errors = {name: ((found[name] - t).norm() / t.norm()).item() for name, t in truth.items()}
    print({name: f"{e:.1e}" for name, e in errors.items()})
    assert max(errors.values()) < error, errors


if __name__ == "__main__":
    write(sys.argv[1])
