"""Packed rows of softmax attention by PyTorch's kernel for sequences, beside float64 on a CPU."""

import pytest
import torch
from tiny_layers import random

from flash_delta.layers import Attention
from flash_delta.parallel import attention as in_parts
from flash_delta.testing import relative_error

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(not in_parts.HAS_ROWS, reason="PyTorch has no kernel for rows of sequences"),
]
BOUNDS, T = [0, 130, 130, 133, 300], 310  # an empty sequence, a short one, padding


def results(layer, x, dy):
    x = x.requires_grad_()
    y = layer(x, cu_seqlens=torch.tensor(BOUNDS, device=x.device))
    return y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 64), (2, 64), (4, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_packed_row(dtype, kv_heads, head_dim, monkeypatch):
    torch.manual_seed(0)
    layer = Attention(256, 4, kv_heads, head_dim=head_dim).to(dtype)
    x, dy = (random(1, T, 256, seed=seed).to(dtype) for seed in range(2))
    exact = Attention(256, 4, kv_heads, head_dim=head_dim).double()
    exact.load_state_dict(layer.state_dict())
    want = results(exact, x.double(), dy.double())
    layer, x, dy = layer.cuda(), x.cuda(), dy.cuda()
    with monkeypatch.context() as without:
        without.setattr(in_parts, "HAS_ROWS", False)
        masked = results(layer, x, dy)
    found = results(layer, x, dy)
    for got, other, right in zip(found, masked, want, strict=True):
        assert relative_error(got, right) <= 1.5 * relative_error(other, right) + 1e-4  # dk of a group: a rounded sum
    assert found[0][:, 300:].eq(0).all()


def test_memory_grows_with_the_row_alone():
    layer = Attention(256, 4, head_dim=64).cuda().bfloat16()
    tokens = 1 << 17  # a mask would take 17 GB
    x = torch.randn(1, tokens, 256, device="cuda", dtype=torch.bfloat16)
    bounds = torch.arange(0, tokens + 1, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    layer(x, cu_seqlens=bounds).float().square().sum().backward()
    assert torch.cuda.max_memory_allocated() < 4e9
