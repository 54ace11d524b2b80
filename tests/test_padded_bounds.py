"""Documents of a packed row with padding between them, as Megatron-Core's ``cu_seqlens_q_padded`` describes them."""

import pytest
import torch

from flash_delta import chunk_gated_delta_rule, chunk_kda
from flash_delta.layers import GatedDeltaNet
from flash_delta.testing import relative_error

LENGTHS, PADDED = (5, 0, 64, 67), (8, 8, 64, 72)
TRUE = torch.cat([torch.arange(p) < n for n, p in zip(LENGTHS, PADDED, strict=True)])


def bounds(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(("op", "channels"), [(chunk_gated_delta_rule, ()), (chunk_kda, (24,))])
@pytest.mark.parametrize("still", [False, True])
def test_padding_changes_no_document(op, channels, still):
    """Nor do gradients, if the outputs of padding have none. Padding that is ``still`` leaves final states, too."""
    gen = torch.Generator().manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, len(TRUE), 2, 24, generator=gen).double(), dim=-1)
    v, do = torch.randn(2, 1, len(TRUE), 2, 16, generator=gen).double()
    g, beta = -torch.rand(1, len(TRUE), 2, *channels, generator=gen).double(), torch.rand(1, len(TRUE), 2).double()
    padded = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if still:
        g[:, ~TRUE], beta[:, ~TRUE] = 0.0, 0.0
    do[:, ~TRUE] = 0.0
    found = []
    for x, do_, lengths in ((padded, do, PADDED), ({n: t[:, TRUE] for n, t in padded.items()}, do[:, TRUE], LENGTHS)):
        given = [t.clone().requires_grad_() for t in x.values()]
        o, state = op(**dict(zip(x, given, strict=True)), cu_seqlens=bounds(lengths), output_final_state=True)
        found.append((o, *torch.autograd.grad(o, given, do_), state))
    (*some, states), (*all_, wanted) = found
    for got, want in zip(some, all_, strict=True):
        assert relative_error(got[:, TRUE], want) < 1e-12
    assert all(not t[:, ~TRUE].any() for t in some[1:])  # gradients of padding
    assert (relative_error(states, wanted) < 1e-12) == still


def test_a_layer_takes_padded_bounds():
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2).double()
    x = torch.randn(1, len(TRUE), 32).double()
    assert (
        relative_error(layer(x, cu_seqlens=bounds(PADDED))[:, TRUE], layer(x[:, TRUE], cu_seqlens=bounds(LENGTHS)))
        < 1e-12
    )
