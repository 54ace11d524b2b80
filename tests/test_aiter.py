"""Functions under aiter's names: arguments in its order, and the op's results."""

import pytest
import torch
from torch.nn import functional as F

from flash_delta import chunk_gated_delta_rule
from flash_delta.integrations.aiter import chunk_gated_delta_rule_opt, chunk_gated_delta_rule_opt_vk

BOUNDS = torch.tensor([0, 40, 70])


@pytest.fixture
def x():
    torch.manual_seed(0)
    q, k = F.normalize(torch.randn(2, 1, 70, 2, 8), dim=-1)
    return [q, k, torch.randn(1, 70, 4, 16), -torch.rand(1, 70, 4), torch.rand(1, 70, 4)]


def test_by_position(x):
    state = torch.randn(2, 4, 8, 16)
    want = chunk_gated_delta_rule(
        *x, scale=0.5, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=BOUNDS
    )
    found = chunk_gated_delta_rule_opt(*x, 0.5, state, True, True, BOUNDS)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    q, k, v, g, beta = x
    out = torch.empty_like(v)
    o, final = chunk_gated_delta_rule_opt_vk(q, k, v, out, g, beta, 0.5, state.mT.contiguous(), True, True, BOUNDS)
    assert o is out
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1].mT)


def test_decoding_rows_are_left_out(x):
    q, k, v, g, beta = x
    want = chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=BOUNDS)
    whole = torch.tensor([0, 1, 2, 42, 72])
    options = {"cu_seqlens": whole, "num_decodes": 2, "num_decode_tokens": 2, "state_dtype": torch.bfloat16}
    o, final = chunk_gated_delta_rule_opt_vk(q, k, v, None, g, beta, output_final_state=True, **options)
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1].mT.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"return_h": True}, "return_h: expected False .prefill_gated_delta_rule has checkpoint_indices., got True"),
        (
            {"initial_state_indices": torch.tensor([0])},
            "initial_state_indices: expected None .prefill_gated_delta_rule",
        ),
        ({"num_decodes": 1}, r"cu_seqlens: expected a tensor \[num_decodes \+ N \+ 1\], got None"),
        ({"o": torch.empty(1, 70, 4, 8)}, r"o: expected a tensor \[1, 70, 4, 16\], got shape \[1, 70, 4, 8\]"),
        ({"o": torch.empty(1, 70, 4, 16).half()}, "o: expected dtype torch.float32, got torch.float16"),
    ],
)
def test_refuses(x, change, message):
    names = dict(zip(("q", "k", "v", "g", "beta"), x, strict=True))
    with pytest.raises(ValueError, match=f"chunk_gated_delta_rule_opt_vk: {message}"):
        chunk_gated_delta_rule_opt_vk(**names | change)
