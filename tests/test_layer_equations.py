"""The mixers against their equations, their parameters against fla's, and what their constructors refuse."""

import pytest
import torch
from tiny_layers import DELTA_LAYERS, HEADS, LAYERS, D, random
from torch.nn import functional as F

from flash_delta import guard_erase
from flash_delta.layers import Attention, GatedDeltaNet, GatedDeltaNet2, KimiDeltaAttention, MixerState
from flash_delta.reference.recurrent import recurrent


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def expected_delta_layer(layer, x):
    """The layers' docstring equations around the token-by-token reference."""

    def heads(name, count):
        conv = getattr(layer, f"{name}_conv1d")
        y = F.pad(getattr(layer, f"{name}_proj")(x), (0, 0, 3, 0)).transpose(1, 2)
        y = F.silu(F.conv1d(y, conv.weight, conv.bias, groups=y.shape[1])).transpose(1, 2)
        return y.unflatten(-1, (count, -1))

    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (heads("q", 2), heads("k", 2)))
    HV, p = layer.num_v_heads, None
    v = heads("v", HV)
    beta = torch.sigmoid(layer.b_proj(x)) * (2 if layer.allow_neg_eigval else 1)
    if isinstance(layer, GatedDeltaNet2):
        a = (layer.f_proj(x) + layer.dt_bias).unflatten(-1, (2, -1))
        g, b = -layer.A_log.exp()[:, None] * F.softplus(a), beta.unflatten(-1, (2, -1))
        g, b = (t.repeat_interleave(HV // 2, 2) for t in (g, b))
        b = guard_erase(k, b, g) if layer.guard else b
        p, v, beta = b * k.repeat_interleave(HV // 2, 2), torch.sigmoid(layer.w_proj(x)).view_as(v) * v, None
        activation = torch.sigmoid
    elif isinstance(layer, GatedDeltaNet):
        g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
        activation = F.silu
    else:
        a, A = (layer.f_proj(x) + layer.dt_bias).unflatten(-1, (HV, -1)), layer.A_log.exp()[:, None]
        bound = layer.lower_bound
        g = -A * F.softplus(a) if bound is None else bound * torch.sigmoid(A * a)
        activation = torch.sigmoid
    o, state = recurrent(q, k, v, g, beta, p)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.o_norm.weight
    return layer.o_proj((o * activation(layer.g_proj(x).view_as(o))).flatten(2)), state


@pytest.mark.parametrize("name", ["gdn", "gdn-grouped", "kda", "kda-bounded", "gdn2", "gdn2-grouped", "gdn2-guarded"])
def test_delta_layer_equals_its_equations(name):
    torch.manual_seed(0)
    layer, x, state = DELTA_LAYERS[name]().double(), random(2, 70, D), MixerState()
    expected, expected_state = expected_delta_layer(layer, x)
    assert_close(layer(x, state=state), expected)
    torch.testing.assert_close(state.recurrent.double(), expected_state, rtol=1e-6, atol=1e-6)


def test_a_guarded_layer_changes_only_what_would_grow():
    torch.manual_seed(0)
    layer, x, states = DELTA_LAYERS["gdn2-guarded"]().double(), random(2, 70, D), []
    for guard in (True, False):
        layer.guard = guard
        tokens, _ = layer.tokens(x)
        states.append(tokens["b"] if guard else 2 * tokens["b"].sigmoid())
    kept = (states[0] == states[1]).all(-1)
    assert 0 < kept.sum() < kept.numel()


def test_attention_equals_its_equation():
    torch.manual_seed(0)
    layer, x = LAYERS["attention"]().double(), random(1, 7, D)
    q, k, v = (p(x).unflatten(-1, (-1, 6)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    pairs = [torch.view_as_complex(torch.stack(y.chunk(2, -1), -1).contiguous()) for y in (q, k)]
    turn = torch.polar(torch.ones(7, 1, 3), torch.arange(7.0)[:, None, None] * 10000.0 ** (-torch.arange(3) / 3))
    q, k = (torch.view_as_real(pair * turn).transpose(-1, -2).flatten(-2) for pair in pairs)
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 6**0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    o = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(layer(x), layer.o_proj(o), rtol=1e-6, atol=1e-6)  # the oracle's angles are fp32


def shapes(layer):
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


# D = 12, H = 2, HV = 4, K = 4, V = 8, W = 4: names and shapes of fla 0.6.0
SHARED_SHAPES = {
    "A_log": (4,),
    "q_proj.weight": (8, 12),
    "k_proj.weight": (8, 12),
    "v_proj.weight": (32, 12),
    "b_proj.weight": (4, 12),
    "q_conv1d.weight": (8, 1, 4),
    "k_conv1d.weight": (8, 1, 4),
    "v_conv1d.weight": (32, 1, 4),
    "o_norm.weight": (8,),
    "o_proj.weight": (12, 32),
}


def test_gdn_parameters_are_named_and_shaped_as_in_fla():
    own = {"dt_bias": (4,), "a_proj.weight": (4, 12), "g_proj.weight": (32, 12)}
    assert shapes(GatedDeltaNet(**HEADS, num_v_heads=4, expand_v=2)) == SHARED_SHAPES | own


def test_kda_parameters_are_named_and_shaped_as_in_fla():
    own = {
        "dt_bias": (16,),
        "f_proj.0.weight": (8, 12),
        "f_proj.1.weight": (16, 8),
        "g_proj.0.weight": (8, 12),
        "g_proj.1.weight": (32, 8),
        "g_proj.1.bias": (32,),
    }
    assert shapes(KimiDeltaAttention(**HEADS, num_v_heads=4, expand_v=2)) == SHARED_SHAPES | own


def test_gdn2_parameters_are_named_and_shaped_as_in_fla():
    own = {
        "A_log": (2,),
        "dt_bias": (8,),
        "b_proj.weight": (8, 12),
        "w_proj.weight": (32, 12),
        "f_proj.0.weight": (8, 12),
        "f_proj.1.weight": (8, 8),
        "g_proj.0.weight": (8, 12),
        "g_proj.1.weight": (32, 8),
        "g_proj.1.bias": (32,),
    }
    assert shapes(GatedDeltaNet2(**HEADS, num_v_heads=4, expand_v=2)) == SHARED_SHAPES | own


GATES = [("gdn", 0, 16), ("kda", 1, 16), ("kda-bounded", 1, 1), ("gdn2", 1, 16), ("gdp", 0, 16)]


@pytest.mark.parametrize(("name", "low", "high"), GATES)
def test_fresh_gates_start_in_their_ranges(name, low, high):
    layer = DELTA_LAYERS[name]()
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert low - 1e-5 <= A.min() <= A.max() <= high + 1e-5
    assert 0.99e-3 <= dt.min() <= dt.max() <= 0.101


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GatedDeltaNet(**HEADS, num_v_heads=0), "num_v_heads: expected a whole number .* got 0"),
        (lambda: GatedDeltaNet(**HEADS | {"num_heads": 0}), "num_heads: expected a whole number .* got 0"),
        (lambda: GatedDeltaNet(**HEADS, num_v_heads=3), "num_v_heads: expected a multiple of num_heads = 2, got 3"),
        (lambda: GatedDeltaNet(**HEADS, expand_v=1.1), r"expand_v: expected head_dim \* expand_v to be whole"),
        (lambda: GatedDeltaNet(**HEADS, mode="fast"), "mode: expected 'chunk' or 'fused_recurrent', got 'fast'"),
        (
            lambda: KimiDeltaAttention(**HEADS, lower_bound=1.0),
            r"lower_bound: expected a number in \[-5, 0\), got 1.0",
        ),
        (lambda: KimiDeltaAttention(**HEADS, lower_bound=-7.0), "lower_bound: expected .* got -7.0"),
        (
            lambda: KimiDeltaAttention(**HEADS, safe_gate=True),
            r"lower_bound: expected a number in \[-5, 0\) with safe_gate=True, got None",
        ),
        (lambda: Attention(D, num_heads=4, num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        (lambda: Attention(D, num_heads=5), "num_heads: expected a divisor of hidden_size = 12, got 5"),
        (lambda: Attention(D, num_heads=4), "head_dim: expected an even width .* got 3"),
    ],
)
def test_constructor_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
