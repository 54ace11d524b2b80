"""A small Gated DeltaNet layer of transformers' Qwen3.5, which trainers change.

``python qwen_layer.py FILE`` writes the truth of their tests: what transformers' own PyTorch code computes.
"""

import subprocess
import sys
from itertools import pairwise
from unittest import mock

import torch

BOUNDS = [0, 13, 40, 70]
SIZES = {
    "hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"],
    "num_hidden_layers": 1,
}  # fmt: skip


def modelling():
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


def pretend_gpu(patch):
    """For transformers 5.5, which takes fla only where there is a GPU. Call it before modelling code is imported."""
    patch.setattr("transformers.utils.import_utils.is_torch_cuda_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def build():
    """The layer in float32, with gates and taps that are not nearly flat."""
    from transformers import Qwen3_5TextConfig

    torch.manual_seed(0)
    layer = modelling().Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**SIZES), layer_idx=0)
    with torch.no_grad():
        layer.A_log.uniform_(-2, 1)
        layer.dt_bias.uniform_(-3, 0)
        layer.conv1d.weight.normal_(0, 0.4)
        for name, p in layer.named_parameters():
            if "proj" in name:
                p.mul_(4)
    return layer


def tensors(kind):
    """Inputs and what the loss multiplies outputs by: of a batch of two rows, or of three documents in one row."""
    gen = torch.Generator().manual_seed(1)
    return torch.randn(2, 1 if kind == "packed" else 2, BOUNDS[-1], SIZES["hidden_size"], generator=gen)


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
    """Documents one by one: transformers' own code does not keep them apart."""
    layer, truth = build(), {}
    for kind in ("batch", "packed"):
        cuts = list(pairwise(BOUNDS)) if kind == "packed" else [(0, BOUNDS[-1])]
        run = lambda x, cuts=cuts: torch.cat([layer(x[:, a:b]) for a, b in cuts], 1)  # noqa: E731
        truth[kind] = _results(layer, *tensors(kind), run)
    torch.save(truth, path)


def read_truth(folder):
    path = str(folder / "truth.pt")
    subprocess.run([sys.executable, "-W", "ignore", __file__, path], check=True)
    return torch.load(path)


def assert_close(found, truth, error=1e-5):
    """By the relative L2 error of each tensor."""
    assert found.keys() == truth.keys()
    errors = {name: ((found[name] - t).norm() / t.norm()).item() for name, t in truth.items()}
    print({name: f"{e:.1e}" for name, e in errors.items()})
    assert max(errors.values()) < error, errors


if __name__ == "__main__":
    write(sys.argv[1])
