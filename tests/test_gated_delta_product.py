"""Gated DeltaProduct: ops and layer against its equation, token by token and update by update in float64."""

import os
from functools import partial
from itertools import pairwise

import pytest
import torch
from serving_truth import needs_triton
from test_gdn2 import with_gradients
from tiny_layers import DELTA_LAYERS, HEADS, D, random
from torch.nn import functional as F

from flash_delta import (
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    decode_gated_delta_product,
    explain,
    fused_recurrent_gated_delta_product,
    fused_recurrent_gated_delta_rule,
    prefill_gated_delta_product,
)
from flash_delta.layers import GatedDeltaProduct, MixerState, tensor_parallel_plan
from flash_delta.testing import assert_accurate

PAIRS = [
    (chunk_gated_delta_product, chunk_gated_delta_rule),
    (fused_recurrent_gated_delta_product, fused_recurrent_gated_delta_rule),
]
OPS = pytest.mark.parametrize("op", [op for op, _ in PAIRS], ids=["chunks", "tokens"])
PACKED = (0, 1, 21, 0, 22, 64, 7, 0)  # 21 and 22 tokens with 3 updates: 63 and 66 rows


def draw(n, B=2, T=47, H=2, HV=4, K=8, V=12, lengths=None, decay=0.3, dtype=torch.float64):
    """Inputs by name, with beta up to 2 and log decays down to -``decay``, or without a decay."""
    torch.manual_seed(0)
    B, T, N = (B, T, B) if lengths is None else (1, sum(lengths), len(lengths))
    q, k = (F.normalize(torch.randn(B, rows, H, K), dim=-1) for rows in (T, n * T))
    x = {"q": q, "k": k, "v": torch.randn(B, n * T, HV, V)}
    x |= {"beta": 2 * torch.rand(B, n * T, HV), "initial_state": torch.randn(N, HV, K, V)}
    x |= {} if decay is None else {"g": -decay * torch.rand(B, T, HV)}
    return {name: t.to(dtype) for name, t in x.items()}


def equation(n, q, k, v, beta, initial_state, g=None, bounds=None, scale=None):
    group, scale = v.shape[2] // q.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    (B, T), heads = q.shape[:2], v.shape[2:]
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    q, k, v, beta = ([row.unbind() for row in t] for t in (q, k, v, beta))
    g = None if g is None else [row.unbind() for row in g]
    rows = range(B) if bounds is None else [0] * (len(bounds) - 1)
    ends, o, states = [(0, T)] * B if bounds is None else pairwise(bounds), [], []
    for row, S, (start, stop) in zip(rows, initial_state, ends, strict=True):
        for t in range(start, stop):
            S = S if g is None else g[row][t].exp()[:, None, None] * S
            for j in range(n * t, n * t + n):
                error = v[row][j] - torch.einsum("hk,hkv->hv", k[row][j], S)
                S = S + beta[row][j][:, None, None] * k[row][j][:, :, None] * error[:, None]
            o.append(scale * torch.einsum("hk,hkv->hv", q[row][t], S))
        states.append(S)
    outputs = torch.stack(o) if o else initial_state.new_zeros(0, *heads)
    return outputs.view(B, -1, *heads), torch.stack(states)


def unit(t):
    return t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def check(op, n, x, lengths=None, **options):
    """Outputs and all gradients against the equation."""
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)

    def call(g=None, **x):
        return op(**x, g=g, num_householder=n, output_final_state=True, cu_seqlens=bounds, **options)

    got, truth = with_gradients(call, x), partial(equation, n, bounds=None if bounds is None else bounds.tolist())
    for name, t in with_gradients(truth, x).items():
        assert got[name].shape == t.shape, name
        assert_accurate(name, got[name], t, torch.float64)


@OPS
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equation(op, n, group):
    check(op, n, draw(n, HV=2 * group))


@OPS
@pytest.mark.parametrize("T", [0, 1, 21, 22, 64])
def test_lengths(op, T):
    """With 3 updates, chunks of 64 rows end inside of a token; chunks of 16, too."""
    check(op, 3, draw(3, T=T))
    if op is chunk_gated_delta_product:
        check(op, 3, draw(3, T=T), chunk_size=16)


@OPS
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decay", [None, 0.0, 30.0, 300.0], ids=["no", "zero", "strong", "extreme"])
def test_packed_sequences(op, n, decay):
    check(op, n, draw(n, lengths=PACKED, H=1, HV=2, decay=decay), PACKED)


@OPS
@pytest.mark.parametrize("given", [torch.tensor, list])
def test_bounds_count_tokens(op, given):
    """Also those on the host. Rows after the last sequence are zeros."""
    x = draw(2, B=1, T=40) | {"initial_state": torch.randn(2, 4, 8, 12, dtype=torch.float64)}
    bounds = [0, 13, 30]
    call = partial(op, **x, num_householder=2, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    o, state = call(cu_seqlens_cpu=given(bounds))
    want, states = equation(2, **x, bounds=bounds)
    assert_accurate("o", o[:, :30], want[:, :30], torch.float64)
    assert_accurate("final_state", state, states, torch.float64)
    assert not o[:, 30:].any()
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu: expected the values of cu_seqlens, \[0, 13, 30\], got"):
        call(cu_seqlens_cpu=given([0, 12, 30]))
    with pytest.raises(ValueError, match="cu_seqlens: expected bounds up to T = 40, got 41"):
        op(**x, num_householder=2, cu_seqlens=torch.tensor([0, 13, 41]))
    with pytest.raises(ValueError, match="q: expected batch size 1 with cu_seqlens"):
        op(**draw(2), num_householder=2, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(("op", "rule"), PAIRS, ids=["chunks", "tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_update_is_the_gated_delta_rule_bit_by_bit(op, rule, dtype):
    x, options = draw(1, dtype=dtype), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    got = with_gradients(lambda **x: op(**x, num_householder=1, **options), x)
    for name, t in with_gradients(lambda **x: rule(**x, **options), x).items():
        assert torch.equal(got[name], t), name


@OPS
def test_activations_in_the_op(op):
    """A row of zeros that is normalised gives no NaN and no gradient. Beta may be a logit, states [N, HV, V, K]."""
    x = draw(2)
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}

    def truth(q, k, beta, **x):
        return equation(2, unit(q), unit(k), beta=2 * beta.sigmoid(), **x, scale=0.3)

    def call(initial_state, **x):
        o, S = op(**x, initial_state=initial_state.mT, num_householder=2, scale=0.3, output_final_state=True,
                  state_v_first=True, **options)  # fmt: skip
        return o, S.mT

    x |= {"q": 3 * x["q"], "k": 3 * x["k"]}
    got = with_gradients(call, x)
    for name, t in with_gradients(truth, x).items():
        assert_accurate(name, got[name], t, torch.float64)


def test_single_tokens_give_the_bits_of_one_call():
    x = draw(3, T=5, dtype=torch.float32)
    state, rows = x.pop("initial_state"), {"q": 1, "g": 1, "k": 3, "v": 3, "beta": 3}
    call = partial(fused_recurrent_gated_delta_product, num_householder=3, output_final_state=True)
    want, final = call(**x, initial_state=state)
    for t in range(5):
        token = {name: y[:, rows[name] * t : rows[name] * (t + 1)] for name, y in x.items()}
        o, state = call(**token, initial_state=state)
        assert torch.equal(o, want[:, t : t + 1])
    assert torch.equal(state, final)


@OPS
@pytest.mark.parametrize("decay", [None, 0.3])
def test_compiled(op, decay):
    x = draw(3, decay=decay)

    def call(g=None, **x):
        return op(**x, g=g, num_householder=3, output_final_state=True)

    got = with_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), x)
    for name, t in with_gradients(call, x).items():
        assert_accurate(name, got[name], t, torch.float64)


def test_bfloat16():
    x = draw(2, dtype=torch.bfloat16)
    want = equation(2, **{name: t.double() for name, t in x.items()})
    for op, _ in PAIRS:
        o, state = op(**x, num_householder=2, output_final_state=True)
        assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        assert o.is_contiguous()
        assert_accurate("o", o, want[0], torch.bfloat16)
        assert_accurate("final_state", state, want[1], torch.bfloat16)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@OPS
@pytest.mark.parametrize("decay", [None, 0.3])
def test_triton(op, decay):
    x = draw(3, B=1, T=23, decay=decay, dtype=torch.float32)

    def call(g=None, **x):
        return op(**x, g=g, num_householder=3, output_final_state=True, backend="triton")

    got = with_gradients(call, x)
    for name, t in with_gradients(partial(equation, 3), {name: t.double() for name, t in x.items()}).items():
        assert_accurate(name, got[name], t, torch.float32)


def test_explain_tells_of_the_rule_that_runs():
    found = explain(chunk_gated_delta_product, **draw(2, T=5), num_householder=2)
    assert (found.backend, found.problem.T) == ("torch", 10)


SLOTS, OTHERS = torch.tensor([5, -1, 2, 0]), torch.tensor([1, 3, 2, 6])
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def serve(op, n, x, pool, backend, **more):
    """A call that reads the slots `SLOTS`, of which one is padding, and writes `OTHERS`."""
    given = {"num_householder": n, "state_pool": pool, "backend": backend, "state_v_first": False}
    return op(**{"g": None} | x | given, read_indices=SLOTS, write_indices=OTHERS, **more)


def check_pool(x, n, o, pool, before, lengths):
    """Each sequence from its slot against the equation. The others' slots stay as they were."""
    bounds, rows = [0, *torch.tensor(lengths).cumsum(0).tolist()], {"q": 1, "g": 1, "k": n, "v": n, "beta": n}
    for i, (start, stop) in enumerate(pairwise(bounds)):
        got = o.reshape(1, -1, *o.shape[2:])[:, start:stop]
        if SLOTS[i] < 0:
            assert not got.any()
            continue
        part = {
            name: t.reshape(1, -1, *t.shape[2:])[:, rows[name] * start : rows[name] * stop] for name, t in x.items()
        }
        part = {name: t.double() for name, t in part.items()}
        want, state = equation(n, **part, initial_state=before[SLOTS[i]][None].double())
        assert_accurate("o", got, want, torch.float32)
        assert_accurate("state", pool[OTHERS[i]][None], state, torch.float32)
    untouched = [slot for slot in range(len(pool)) if slot not in OTHERS[SLOTS >= 0]]
    assert torch.equal(pool[untouched], before[untouched])


@BACKENDS
@pytest.mark.parametrize("decay", [None, 0.3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_prompts_on_a_pool(n, decay, backend):
    """Long and short ones, one without a token."""
    lengths = (40, 3, 0, 7)
    x = draw(n, lengths=lengths, H=1, HV=2, decay=decay, dtype=torch.float32)
    del x["initial_state"]
    pool = torch.randn(7, 2, 8, 12)
    before, bounds = pool.clone(), torch.tensor([0, *lengths]).cumsum(0)
    o = serve(prefill_gated_delta_product, n, x, pool, backend, cu_seqlens=bounds)
    check_pool(x, n, o, pool, before, lengths)


@BACKENDS
@pytest.mark.parametrize("decay", [None, 0.3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_tokens_on_a_pool(n, decay, backend):
    """Several tokens in one call give the bits of calls with one token."""
    x = draw(n, B=4, T=3, H=1, HV=2, decay=decay, dtype=torch.float32)
    del x["initial_state"]
    pool = torch.randn(7, 2, 8, 12)
    before, steps = pool.clone(), pool.clone()
    o = serve(decode_gated_delta_product, n, x, pool, backend)
    check_pool(x, n, o, pool, before, (3, 3, 3, 3))
    rows, read = {"q": 1, "g": 1, "k": n, "v": n, "beta": n}, SLOTS
    for t in range(3):
        token = {name: y[:, rows[name] * t : rows[name] * (t + 1)] for name, y in x.items()}
        given = {"num_householder": n, "state_pool": steps, "backend": backend, "state_v_first": False}
        one = decode_gated_delta_product(**{"g": None} | token | given, read_indices=read, write_indices=OTHERS)
        read = torch.where(SLOTS < 0, -1, OTHERS)
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(steps, pool)


def test_refusals_on_a_pool():
    x = draw(3, B=4, T=6, H=1, HV=2, dtype=torch.float32)
    x["state_pool"], x["read_indices"] = x.pop("initial_state"), torch.arange(4)
    op, given = decode_gated_delta_product, {"num_householder": 3, "state_v_first": False}
    with pytest.raises(ValueError, match=r"decode_gated_delta_product: q: expected 1 to 5 tokens .* 3 updates, got 6"):
        op(**x, **given)
    token = {name: t if t.shape[1] not in (6, 18) else t[:, : t.shape[1] // 6] for name, t in x.items() if t.dim() > 1}
    token["read_indices"] = x["read_indices"]
    with pytest.raises(ValueError, match=r"write_indices: expected a tensor \[4\], got shape \[4, 3\]"):
        op(**token, **given, write_indices=torch.zeros(4, 3, dtype=torch.int64))
    assert explain(op, **token, **given).backend == "torch"


WRONG = {
    "no update": ({"num_householder": 0}, "num_householder: expected a whole number from 1 .*, got 0"),
    "a fraction": ({"num_householder": 1.5}, "num_householder: expected a whole number from 1 .*, got 1.5"),
    "keys": ({"num_householder": 3}, r"k: expected a tensor \[1, 15, 2, 8\], got shape \[1, 10, 2, 8\]"),
    "values": ({"v": torch.zeros(1, 5, 4, 12)}, r"v: expected a tensor \[1, 10, HV, V\], got shape \[1, 5, 4, 12\]"),
    "gate": ({"g": torch.zeros(1, 10, 4)}, r"g: expected a tensor \[1, 5, 4\], got shape \[1, 10, 4\]"),
    "strength": ({"beta": torch.zeros(1, 5, 4)}, r"beta: expected a tensor \[1, 10, 4\], got shape \[1, 5, 4\]"),
    "key heads": ({"k": torch.zeros(1, 10, 4, 8)}, r"k: expected a tensor \[1, 10, 2, 8\], got shape \[1, 10, 4, 8\]"),
    "value heads": (
        {"v": torch.zeros(1, 10, 3, 12), "g": None, "beta": torch.zeros(1, 10, 3)},
        "v: expected a number of heads .* multiple of q's 2 heads, got 3",
    ),
    "none": ({"q": None}, r"q: expected a tensor \[B, T, H, K\], got None"),
    "bounds": ({"cu_seqlens_cpu": [0, 5]}, r"cu_seqlens_cpu: expected None \(there is no cu_seqlens\), got list"),
    "dtype": ({"v": torch.zeros(1, 10, 4, 12).half()}, "v: expected torch.float32 like q, got torch.float16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    change, message = WRONG[name]
    x = draw(2, B=1, T=5, dtype=torch.float32) | {"num_householder": 2} | change
    with pytest.raises(ValueError, match=f"chunk_gated_delta_product: {message}"):
        chunk_gated_delta_product(**x)


SHAPES = {
    "a_proj.weight": (4, 12), "b_proj.weight": (12, 12), "q_proj.weight": (8, 12), "k_proj.weight": (24, 12),
    "v_proj.weight": (96, 12), "g_proj.weight": (32, 12), "o_proj.weight": (12, 32), "o_norm.weight": (8,),
    "q_conv1d.weight": (8, 1, 4), "k_conv1d.weight": (24, 1, 4), "v_conv1d.weight": (96, 1, 4), "A_log": (4,),
    "dt_bias": (4,),
}  # fmt: skip


def test_parameters_are_named_and_shaped_as_in_fla():
    layer = GatedDeltaProduct(**HEADS, num_v_heads=4, num_householder=3)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == SHAPES
    bare = GatedDeltaProduct(**HEADS, use_forget_gate=False, use_output_gate=False, use_short_conv=False)
    assert {*bare.state_dict()} == {f"{name}_proj.weight" for name in "qkvbo"} | {"o_norm.weight"}


@pytest.mark.parametrize("name", ["gdp", "gdp-grouped", "gdp-bare"])
def test_layer_equals_its_equation(name):
    torch.manual_seed(0)
    layer, x, state = DELTA_LAYERS[name]().double(), random(2, 20, D), MixerState()
    n, HV = layer.num_householder, layer.num_v_heads

    def tokens(name, heads):
        y = getattr(layer, f"{name}_proj")(x)
        if layer.use_short_conv:
            conv = getattr(layer, f"{name}_conv1d")
            y = F.conv1d(F.pad(y.mT, (3, 0)), conv.weight, conv.bias, groups=y.shape[-1]).mT
        y = F.silu(y).view(2, 20, -1, heads, layer.head_v_dim if name == "v" else layer.head_k_dim)
        y = torch.cat([y[:, t, j : j + 1] for t in range(20) for j in range(y.shape[2])], 1)
        return y if name == "v" else unit(y)

    beta = layer.b_proj(x).sigmoid().view(2, 20 * n, HV) * (2 if layer.allow_neg_eigval else 1)
    g = None
    if layer.use_forget_gate:
        g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    zeros = torch.zeros(2, HV, layer.head_k_dim, layer.head_v_dim, dtype=torch.float64)
    o, final = equation(n, tokens("q", 2), tokens("k", 2), tokens("v", HV), beta, zeros, g)
    o = F.rms_norm(o, o.shape[-1:], layer.o_norm.weight, 1e-5)
    o = o * F.silu(layer.g_proj(x).view_as(o)) if layer.use_gate else o
    y = layer(x, state=state)
    assert_accurate("y", y, layer.o_proj(o.flatten(2)), torch.float64)
    assert_accurate("final_state", state.recurrent, final, torch.float64)


def test_layer_with_one_update_is_gated_delta_nets():
    torch.manual_seed(0)
    layer, other = GatedDeltaProduct(**HEADS, num_householder=1, allow_neg_eigval=False), DELTA_LAYERS["gdn"]()
    layer.load_state_dict(other.state_dict())
    x = random(2, 40, D).float()
    torch.testing.assert_close(layer(x), other(x))


def test_layer_refuses():
    with pytest.raises(ValueError, match=r"GatedDeltaProduct: num_householder: expected a whole number .*, got 0"):
        GatedDeltaProduct(**HEADS, num_householder=0)
    with pytest.raises(ValueError, match="layer: expected one with num_householder = 1, got GatedDeltaProduct with 2"):
        tensor_parallel_plan(GatedDeltaProduct(**HEADS))
