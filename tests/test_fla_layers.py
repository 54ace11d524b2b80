"""fla's layers DeltaNet, Comba and SimpleGatedLinearAttention: their equations token by token, their checkpoints."""

import importlib
import warnings

import pytest
import torch
from tiny_layers import random
from torch.nn import functional as F

from flash_delta import layers as own
from flash_delta.integrations.fla import layers
from flash_delta.integrations.fla.layers.delta_net import sum_norm
from flash_delta.integrations.fla.modules.causal_conv1d import causal_conv1d_update_states
from flash_delta.integrations.fla.modules.layernorm import rms_norm
from flash_delta.integrations.fla.modules.norm.fused_norm_gate import rms_norm_gated
from flash_delta.integrations.fla.ops.delta_rule import naive as delta_naive
from flash_delta.integrations.fla.ops.simple_gla import naive as gla_naive

D = 12
HEADS = {"hidden_size": D, "head_dim": 4, "num_heads": 2, "layer_idx": 1}
WIDTH = {"hidden_size": D, "num_heads": 2, "layer_idx": 1}
# Options, and the parameters that fla 0.6.0 has with them: one shape for each name.
KINDS = {
    "delta": (
        ("DeltaNet", {**WIDTH}),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, o_proj 12x12, b_proj 2x12, o_norm 6,"
        " q_conv1d 12x1x4, k_conv1d 12x1x4, v_conv1d 12x1x4",
    ),
    "delta-wide": (
        ("DeltaNet", {**WIDTH, "expand_k": 2 / 3, "expand_v": 2, "use_beta": False, "use_gate": True}),
        "q_proj 8x12, k_proj 8x12, v_proj 24x12, o_proj 12x24, g_proj 24x12, o_norm 12,"
        " q_conv1d 8x1x4, k_conv1d 8x1x4, v_conv1d 24x1x4",
    ),
    "delta-relu": (
        ("DeltaNet", {**WIDTH, "qk_activation": "relu", "qk_norm": "sum", "conv_bias": True, "conv_size": 3}),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, o_proj 12x12, b_proj 2x12, o_norm 6, q_conv1d 12x1x3,"
        " k_conv1d 12x1x3, v_conv1d 12x1x3, q_conv1d.bias 12, k_conv1d.bias 12, v_conv1d.bias 12",
    ),
    "delta-elu": (
        (
            "DeltaNet",
            {
                "d_model": D,
                **WIDTH,
                "hidden_size": 99,
                "qk_activation": "elu",
                "use_short_conv": False,
                "allow_neg_eigval": True,
                "use_beta": False,
            },
        ),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, o_proj 12x12, o_norm 6",
    ),
    "delta-identity": (
        ("DeltaNet", {**WIDTH, "qk_activation": "identity", "allow_neg_eigval": True, "mode": "fused_recurrent"}),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, o_proj 12x12, b_proj 2x12, o_norm 6,"
        " q_conv1d 12x1x4, k_conv1d 12x1x4, v_conv1d 12x1x4",
    ),
    "comba": (
        ("Comba", {**HEADS}),
        "q_proj 8x12, k_proj 8x12, v_proj 16x12, a_proj 2x12, b_proj 2x12, g_proj 16x12, o_proj 12x16, o_norm 8,"
        " decay = 2, D = 2, A_log = 2, dt_bias = 2, q_conv1d 8x1x4, k_conv1d 8x1x4, v_conv1d 16x1x4",
    ),
    "comba-grouped": (
        ("Comba", {**HEADS, "num_v_heads": 4, "expand_v": 1, "correction_factor": 0.02, "use_inner_decay": False}),
        "q_proj 8x12, k_proj 8x12, v_proj 16x12, a_proj 4x12, b_proj 4x12, g_proj 16x12, o_proj 12x16, o_norm 4,"
        " D = 2, A_log = 4, dt_bias = 4, q_conv1d 8x1x4, k_conv1d 8x1x4, v_conv1d 16x1x4",
    ),
    "comba-bare": (
        (
            "Comba",
            {
                **HEADS,
                "use_output_correction": False,
                "use_output_gate": False,
                "use_short_conv": False,
                "mode": "fused_recurrent",
            },
        ),
        "q_proj 8x12, k_proj 8x12, v_proj 16x12, a_proj 2x12, b_proj 2x12, o_proj 12x16, o_norm 8, decay = 2,"
        " A_log = 2, dt_bias = 2",
    ),
    "gla": (
        ("SimpleGatedLinearAttention", {**WIDTH}),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, g_proj 12x12, gk_proj 2x12, gk_proj.bias 2, o_proj 12x12,"
        " g_norm_swish_gate 6, q_conv1d 12x1x4, k_conv1d 12x1x4, v_conv1d 12x1x4",
    ),
    "gla-grouped": (
        (
            "SimpleGatedLinearAttention",
            {
                **WIDTH,
                "num_heads": 4,
                "num_kv_heads": 2,
                "expand_v": 2,
                "feature_map": "sqrelu",
                "gate_fn": "gelu",
                "conv_bias": True,
                "gate_logit_normalizer": 4,
            },
        ),
        "q_proj 12x12, k_proj 6x12, v_proj 12x12, g_proj 24x12, gk_proj 4x12, gk_proj.bias 4, o_proj 12x24, g_norm 6,"
        " q_conv1d 12x1x4, k_conv1d 6x1x4, v_conv1d 12x1x4, q_conv1d.bias 12, k_conv1d.bias 6, v_conv1d.bias 12",
    ),
    "gla-bare": (
        (
            "SimpleGatedLinearAttention",
            {
                **WIDTH,
                "elementwise_affine": False,
                "use_short_conv": False,
                "fuse_norm": False,
                "feature_map": "logsigmoid",
            },
        ),
        "q_proj 12x12, k_proj 12x12, v_proj 12x12, g_proj 12x12, gk_proj 2x12, gk_proj.bias 2, o_proj 12x12",
    ),
}
MAPS = {
    None: lambda x: x,
    "sqrelu": lambda x: torch.where(x > 0, x * x, 0),
    "logsigmoid": lambda x: -torch.log1p(torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "identity": lambda x: x,
    "silu": lambda x: x,  # of DeltaNet: the convolution's
}


def build(kind):
    torch.manual_seed(0)
    (name, options), _ = KINDS[kind]
    layer = getattr(layers, name)(**options).double()
    with torch.no_grad():  # away from where parameters start: equal numbers hide which is which
        for _, p in sorted(layer.named_parameters()):
            p.add_(0.3 * torch.randn_like(p))
    return layer


# One sequence [T, D], token by token.


def silu(x):
    return x / (1 + torch.exp(-x))


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * (1 if weight is None else weight)


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def convolved(layer, name, x, options, activation):
    y = x @ getattr(layer, f"{name}_proj").weight.T
    if options.get("use_short_conv", True):
        conv = getattr(layer, f"{name}_conv1d")
        taps = conv.weight[:, 0]  # [D, W]
        W = taps.shape[1]
        before = torch.cat([y.new_zeros(W - 1, y.shape[1]), y])
        y = torch.stack([(before[t : t + W].T * taps).sum(1) for t in range(len(y))])
        y = y if conv.bias is None else y + conv.bias
    return silu(y) if activation else y


def naive_delta(layer, x, o):
    act = o.get("qk_activation", "silu")
    q, k, v = (convolved(layer, name, x, o, name == "v" or act == "silu") for name in "qkv")
    q, k, v = (y.unflatten(-1, (2, -1)) for y in (MAPS[act](q), MAPS[act](k), v))
    q, k = (y / y.abs().sum(-1, keepdim=True).clamp(min=1e-6) if o.get("qk_norm") == "sum" else unit(y) for y in (q, k))
    beta = torch.sigmoid(x @ layer.b_proj.weight.T) if o.get("use_beta", True) else x.new_ones(len(x), 2)
    beta = 2 * beta if o.get("allow_neg_eigval") else beta
    S, out = x.new_zeros(2, k.shape[-1], v.shape[-1]), []
    for t in range(len(x)):
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], S)
        S = S + beta[t, :, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
        out.append(torch.einsum("hk,hkv->hv", q[t], S) * k.shape[-1] ** -0.5)
    y = rms(torch.stack(out), layer.o_norm.weight)
    y = y * silu(x @ layer.g_proj.weight.T).view_as(y) if o.get("use_gate") else y
    return y.flatten(1) @ layer.o_proj.weight.T, S


def naive_comba(layer, x, o):
    HV = o.get("num_v_heads", 2)
    q, k, v = (convolved(layer, name, x, o, True) for name in "qkv")
    q, k, v = q.unflatten(-1, (2, -1)), k.unflatten(-1, (2, -1)), v.unflatten(-1, (HV, -1))
    p = k * torch.sigmoid(layer.decay)[:, None] if o.get("use_inner_decay", True) else k
    q = q - layer.D[:, None] * p if o.get("use_output_correction", True) else q
    q, k, p = (unit(y).repeat_interleave(HV // 2, 1) for y in (q, k, p))
    beta = torch.sigmoid(x @ layer.b_proj.weight.T)
    decay = torch.exp(-layer.A_log.exp() * torch.log1p(torch.exp(x @ layer.a_proj.weight.T + layer.dt_bias)))
    S, out = x.new_zeros(HV, k.shape[-1], v.shape[-1]), []
    for t in range(len(x)):
        error = v[t] - torch.einsum("hk,hkv->hv", p[t], S)  # of the state before its decay
        S = decay[t, :, None, None] * S + beta[t, :, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
        out.append(torch.einsum("hk,hkv->hv", q[t], S) * k.shape[-1] ** -0.5)
    y = rms(torch.stack(out), layer.o_norm.weight)
    if o.get("use_output_gate", True):
        y = y * torch.sigmoid(x @ layer.g_proj.weight.T).view_as(y)
    return y.flatten(1) @ layer.o_proj.weight.T, S


def naive_gla(layer, x, o):
    H, groups = o["num_heads"], o["num_heads"] // o.get("num_kv_heads", o["num_heads"])
    q, k, v = (convolved(layer, name, x, o, o.get("use_short_conv", True)) for name in "qkv")
    q, k = MAPS[o.get("feature_map")](q), MAPS[o.get("feature_map")](k)
    q = q.unflatten(-1, (H, -1))
    k, v = (torch.stack([y.unflatten(-1, (H // groups, -1))[:, h // groups] for h in range(H)], 1) for y in (k, v))
    decay = torch.sigmoid(x @ layer.gk_proj.weight.T + layer.gk_proj.bias) ** (1 / o.get("gate_logit_normalizer", 16))
    S, out = x.new_zeros(H, k.shape[-1], v.shape[-1]), []
    for t in range(len(x)):
        S = decay[t, :, None, None] * S + torch.einsum("hk,hv->hkv", k[t], v[t])
        out.append(torch.einsum("hk,hkv->hv", q[t], S) * k.shape[-1] ** -0.5)
    fused = o.get("fuse_norm", True) and o.get("gate_fn", "swish") == "swish"
    norm = layer.g_norm_swish_gate if fused else layer.g_norm
    y, g = rms(torch.stack(out), norm.weight), x @ layer.g_proj.weight.T
    gate = F.gelu(g, approximate="tanh") if o.get("gate_fn") == "gelu" else silu(g)
    return (y * gate.view_as(y)).flatten(1) @ layer.o_proj.weight.T, S


NAIVE = {"DeltaNet": naive_delta, "Comba": naive_comba, "SimpleGatedLinearAttention": naive_gla}


def naive(kind, layer, x):
    (name, options), _ = KINDS[kind]
    return NAIVE[name](layer, x, options)


def assert_close(actual, expected, error=1e-9):
    torch.testing.assert_close(actual, expected, rtol=error, atol=error)


class States(list):
    """The least that fla's protocol for caches asks of one."""

    def update(self, recurrent_state, conv_state, layer_idx, offset):
        self[layer_idx : layer_idx + 1] = [{"recurrent_state": recurrent_state, "conv_state": conv_state}]


@pytest.mark.parametrize("kind", KINDS)
def test_dense_and_its_gradients(kind):
    layer, x = build(kind), random(2, 21, D).requires_grad_()
    y, weights, cache = layer(x)
    assert (weights, cache) == (None, None)
    expected = torch.stack([naive(kind, layer, row)[0] for row in x])
    assert_close(y, expected)
    leaves = [x, *layer.parameters()]
    dy = random(*y.shape, seed=1)
    gradients = torch.autograd.grad(expected, leaves, dy)
    for got, want in zip(torch.autograd.grad(y, leaves, dy), gradients, strict=True):
        assert_close(got, want, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_packed_and_over_a_chunk(kind):
    layer, x = build(kind), random(2, 70, D)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :9], mask[1, 66:] = 0, 0  # on either side
    y, _, _ = layer(x, attention_mask=mask)
    for row, (start, end) in enumerate([(9, 70), (0, 66)]):
        assert_close(y[row, start:end], naive(kind, layer, x[row, start:end])[0])
    bounds = torch.tensor([0, 3, 3, 70])
    packed, _, _ = layer(x[:1], cu_seqlens=bounds)
    assert_close(packed[0], torch.cat([naive(kind, layer, part)[0] for part in x[0].split([3, 67])]))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_prefill_then_decode(kind):
    layer, x, cache = build(kind).eval(), random(2, 30, D), States([None])
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :4] = 0
    parts = []
    for start, end in [(0, 24), (24, 28), (28, 29), (29, 30)]:
        y, _, _ = layer(x[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        parts.append(y)
    y, state = torch.cat(parts, 1), cache[1]["recurrent_state"]
    for row, start in enumerate([0, 4]):
        expected, S = naive(kind, layer, x[row, start:])
        assert_close(y[row, start:], expected)
        kept = state[row].mT if isinstance(layer, layers.SimpleGatedLinearAttention) else state[row]
        assert_close(kept.double(), S, 1e-6)  # fla's order of the two axes


def shapes_of(listed):
    """fla's names, from the short forms of the table."""
    found = {}
    for entry in listed.split(", "):
        *name, shape = entry.replace(" = ", " ").split()
        bare = " = " in entry or "." in name[0]
        found[name[0] if bare else f"{name[0]}.weight"] = tuple(map(int, shape.split("x")))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_named_and_shaped_as_in_fla(kind):
    _, listed = KINDS[kind]
    assert {name: tuple(p.shape) for name, p in build(kind).state_dict().items()} == shapes_of(listed)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_both_ways(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU, the missing convolution, Comba's factor
        pytest.importorskip("fla.layers")
        (name, options), _ = KINDS[kind]
        modules = {"DeltaNet": "delta_net", "Comba": "comba"}
        theirs = getattr(importlib.import_module("fla.layers." + modules.get(name, "simple_gla")), name)(**options)
    ours = build(kind).float()
    assert {n: p.shape for n, p in theirs.state_dict().items()} == {n: p.shape for n, p in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_gates_are_marked():
    layer = layers.Comba(**HEADS)
    marked = {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias", "D"}  # as in fla, where decay is not
    assert layer.D.eq(1).all()
    assert layers.Comba(**HEADS, correction_factor=0.02).D.eq(0.02).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.DeltaNet("fused_chunk", **WIDTH), "mode: expected 'chunk' or 'fused_recurrent'"),
        (lambda: layers.DeltaNet(**WIDTH, qk_activation="gelu"), "qk_activation: expected one of silu, relu, elu,"),
        (lambda: layers.DeltaNet(**WIDTH, qk_norm="l1"), "qk_norm: expected 'l2' or 'sum', got 'l1'"),
        (lambda: layers.DeltaNet(**WIDTH, expand_k=0.3), "expand_k: expected hidden_size . expand_k to be a multiple"),
        (lambda: layers.DeltaNet(**WIDTH, expand_v=0.25), "expand_v: expected .* got 12 . 0.25"),
        (lambda: layers.Comba(**HEADS, num_v_heads=3), "num_v_heads: expected a multiple"),
        (lambda: layers.SimpleGatedLinearAttention(**WIDTH, num_kv_heads=4), "num_kv_heads: expected a divisor"),
        (lambda: layers.SimpleGatedLinearAttention(**WIDTH, gate_fn="bias_gelu"), "gate_fn: expected one of .* got"),
        (lambda: layers.SimpleGatedLinearAttention(**WIDTH, feature_map="x"), "feature_map: expected one of .* got"),
        (lambda: own.SimpleGatedLinearAttention(**WIDTH, gate_fn=None), "gate_fn: expected one of .* got None"),
    ],
)
def test_constructors_refuse(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Functions of fla beside the layers.


def test_sum_norm():
    x = torch.tensor([[3.0, -1.0], [1e-7, 0.0]])  # the second row's sum is less than the least divisor
    assert_close(sum_norm(x), torch.tensor([[0.75, -0.25], [0.1, 0.0]]), 1e-6)


def test_norm_functions():
    x, g, residual, weight = random(4, 3, 5, 6).float().unbind()
    weight = weight[0, 0]
    total = x + residual
    normal = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y, kept = rms_norm(x, weight, None, residual, prenorm=True)
    assert_close((y, kept), (normal * weight, total), 1e-5)
    assert_close(rms_norm(total, None, None), normal, 1e-5)
    y, kept = rms_norm_gated(x, g, weight, None, "sigmoid", residual, True, eps=1e-5)
    assert_close((y, kept), (normal * weight * g.sigmoid(), total), 1e-5)
    half = rms_norm_gated(x.bfloat16(), g, None, None, residual_in_fp32=True, prenorm=True)
    assert [t.dtype for t in half] == [torch.bfloat16, torch.float32]
    for call in (lambda: rms_norm(x, weight, weight), lambda: rms_norm_gated(x, g, weight, weight)):
        with pytest.raises(ValueError, match="bias: expected None, got a tensor"):
            call()


def test_states_of_convolutions():
    x, past = random(2, 5, 3), random(2, 3, 4, seed=1)
    assert torch.equal(causal_conv1d_update_states(x, 4), x[:, 1:].mT)
    bounds = torch.tensor([0, 1, 5])
    for row in (x[:1], x[0]):
        state = causal_conv1d_update_states(row, 4, past, bounds)
        assert torch.equal(state[0], torch.cat([past[0, :, 1:], x[0, :1].T], 1))
        assert torch.equal(state[1], x[0, 1:].T)


def test_naive_delta_rule_has_heads_first():
    q, k = unit(random(2, 1, 2, 64, 4))
    v, beta = random(1, 2, 64, 3, seed=1), random(1, 2, 64, seed=2).sigmoid()
    start, out = random(1, 2, 4, 3, seed=3), []
    S = start
    for t in range(64):
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)
        S = S + beta[:, :, t, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, :, t], error)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S) / 2)
    expected = torch.stack(out, 2)
    o, state = delta_naive.delta_rule_recurrence(q, k, v, beta, start)
    assert o.dtype == torch.float64
    assert_close((o, state.double()), (expected, S), 1e-5)
    assert delta_naive.delta_rule_recurrence(q, k, v, beta, output_final_state=False)[1] is None
    with pytest.raises(ValueError, match="beta: expected one number per head and token"):
        delta_naive.delta_rule_recurrence(q, k, v, beta[..., None].expand_as(v))
    o, _ = delta_naive.delta_rule_chunkwise(q, k, v, beta)
    assert_close(o, delta_naive.delta_rule_recurrence(q, k, v, beta)[0], 1e-5)


def test_naive_parallel_simple_gla_returns_its_weights():
    q, k, v, g = random(2, 9, 2, 4), random(2, 9, 2, 4, seed=1), random(2, 9, 2, 3, seed=2), -random(2, 9, 2).abs()
    o, weights = gla_naive.naive_parallel_simple_gla(q, k, v, g)
    total = g.cumsum(1).transpose(1, 2)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    expected = torch.einsum("bthk,bshk->bhts", q, k) / 2 * decay
    assert_close(weights.double(), expected, 1e-5)
    assert_close(o.double(), torch.einsum("bhts,bshv->bthv", expected, v), 1e-5)


def test_naive_functions_are_those_of_fla():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        theirs = pytest.importorskip("fla.ops.delta_rule.naive")
        gla = pytest.importorskip("fla.ops.simple_gla.naive")
    q, k, v = unit(random(3, 1, 2, 64, 4)).float()
    beta = random(1, 2, 64).sigmoid().float()
    for name in ("delta_rule_recurrence", "delta_rule_chunkwise"):
        assert_close(getattr(delta_naive, name)(q, k, v, beta), getattr(theirs, name)(q, k, v, beta), 1e-4)
    q, k, v, g = (y.transpose(1, 2) for y in (q, k, v, -beta))
    assert_close(gla_naive.naive_parallel_simple_gla(q, k, v, g), gla.naive_parallel_simple_gla(q, k, v, g), 1e-4)
