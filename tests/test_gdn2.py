"""GDN-2: what its gates b and w mean, beside the matrix that it shares with the other members (test_accuracy.py)."""

from functools import partial

import pytest
import torch
from prefill_truth import check as check_prefill
from prefill_truth import make_prefill
from prompt_truth import check_prompts, make_prompts
from serving_truth import make_call, needs_triton, slots
from test_serving import check as check_decode
from test_serving_step import check as check_step
from test_serving_step import make_step

import flash_delta
from flash_delta import chunk_gdn2, chunk_kda, explain, fused_recurrent_gdn2, fused_recurrent_kda
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import CASES, MEMBERS, assert_accurate, make_inputs, relative_error

OPS = pytest.mark.parametrize("op", [chunk_gdn2, fused_recurrent_gdn2], ids=lambda op: op.__name__)
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
PACKED = (0, 1, 63, 0, 64, 65, 7, 0)


def draw(B=2, T=75, H=2, HV=4, K=8, V=12, lengths=None, most=1.0, decay=0.3, dtype=torch.float64):
    """Inputs by name, with b up to ``most``, w up to 1 and log decays down to -``decay``."""
    torch.manual_seed(0)
    B, T, N = (B, T, B) if lengths is None else (1, sum(lengths), len(lengths))
    q, k = torch.nn.functional.normalize(torch.randn(2, B, T, H, K, dtype=dtype), dim=-1)
    g, b = torch.rand(2, B, T, HV, K, dtype=dtype)
    x = {"q": q, "k": k, "v": torch.randn(B, T, HV, V, dtype=dtype), "g": -decay * g, "b": most * b}
    return x | {"w": torch.rand(B, T, HV, V, dtype=dtype), "initial_state": torch.randn(N, HV, K, V, dtype=dtype)}


def definition(q, k, v, g, b, w, initial_state, bounds=None, erase="decayed"):
    p = b * k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    return recurrent(q, k, w * v, g, None, p, initial_state=initial_state, cu_seqlens=bounds, erase=erase)


def with_gradients(call, x):
    """o, the final state, and the gradients of one random loss."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    outputs = call(**leaves)
    torch.manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, dtype=torch.float64)).sum() for y in outputs)
    gradients = torch.autograd.grad(loss, leaves.values(), materialize_grads=True)
    return dict(zip(("o", "final_state"), outputs, strict=True)) | dict(zip(leaves, gradients, strict=True))


def check(op, x, lengths=None, **options):
    """Outputs and gradients against the definition, in float64."""
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    got = with_gradients(partial(op, output_final_state=True, cu_seqlens=bounds, **options), x)
    want = with_gradients(partial(definition, bounds=None if bounds is None else bounds.tolist()), x)
    for name, t in want.items():
        assert_accurate(name, got[name], t, torch.float64)


@OPS
@pytest.mark.parametrize("most", [1.0, 2.0])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_value_heads_of_a_key_head(op, group, most):
    check(op, draw(B=1, T=67, H=2, HV=2 * group, most=most))


@OPS
@pytest.mark.parametrize("decay", [0.0, 0.3, 30.0], ids=["none", "mild", "strong"])
def test_packed_sequences(op, decay):
    check(op, draw(lengths=PACKED, H=1, HV=2, most=2.0, decay=decay), PACKED)


@OPS
def test_gates_of_exactly_0_and_1(op):
    x = draw()
    check(op, x | {name: x[name].round() for name in ("b", "w")})


@pytest.mark.parametrize(
    ("op", "kda"), [(chunk_gdn2, chunk_kda), (fused_recurrent_gdn2, fused_recurrent_kda)], ids=["chunks", "tokens"]
)
@pytest.mark.parametrize("raw", [False, True], ids=["given", "logits"])
@pytest.mark.parametrize("doubled", [False, True], ids=["to 1", "to 2"])
def test_one_number_for_both_gates_is_kda(op, kda, raw, doubled):
    """With raw gates only b is doubled. So KDA's beta of 2 sigmoid(z) is b, and w has to be given twice as large."""
    x = draw(most=1.0 + doubled)
    beta = x.pop("b")[..., 0]
    del x["w"]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if raw:
        beta, options = 4 * beta - 2, options | {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": doubled}

    def both(beta, v, **x):
        b, w = beta[..., None].expand(x["g"].shape), beta[..., None].expand(v.shape)
        return op(**x, v=(1 + (raw and doubled)) * v, b=b, w=w, **options)

    want = with_gradients(lambda **x: kda(**x, **options), x | {"beta": beta})
    for name, t in with_gradients(both, x | {"beta": beta}).items():
        assert_accurate(name, t, want[name], torch.float64)


@OPS
def test_without_writing_and_erasing_only_the_decay_is_left(op):
    x = draw()
    x |= {name: torch.zeros_like(x[name]) for name in ("b", "w")}
    left = x["g"].sum(1).exp()[..., None] * x["initial_state"]
    _, state = op(**x, output_final_state=True)
    assert relative_error(state, left) < 1e-12
    o, state = op(**x | {"initial_state": None, "b": torch.ones_like(x["b"])}, output_final_state=True)
    assert not o.any()
    assert not state.any()


@OPS
def test_without_erasing_it_is_gated_linear_attention(op):
    x = draw()
    x["b"] = torch.zeros_like(x["b"])
    want = definition(**x, erase=None)
    for got, t in zip(op(**x, output_final_state=True), want, strict=True):
        assert_accurate("result", got, t, torch.float64)


@OPS
@pytest.mark.parametrize("lengths", [None, (64, 0, 86)], ids=["batch", "packed"])
def test_expanded_gates(op, lengths):
    """One number for all channels or all heads, without a copy: the same bits, and gradients of the one number."""
    x = draw(T=128, lengths=lengths)
    B, T, HV, K = x["b"].shape
    given = {"b": x["b"][..., :1], "g": x["g"][:, :, :1], "w": x["w"][:1, :1]}
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)

    def call(copied, b, g, w, **x):
        b, g, w = b.expand(B, T, HV, K), g.expand(B, T, HV, K), w.expand(x["v"].shape)
        gates = {"b": b, "g": g, "w": w}
        assert all(0 in t.stride() for t in gates.values())
        gates = {n: t.contiguous() for n, t in gates.items()} if copied else gates
        return op(**x, **gates, output_final_state=True, cu_seqlens=bounds)

    got, want = (with_gradients(partial(call, copied), x | given) for copied in (False, True))
    for name, t in want.items():
        assert torch.equal(got[name], t), name
    assert got["b"].shape == (B, T, HV, 1)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_states_of_chunks(chunk_size):
    x = draw(T=130)
    _, _, states = chunk_gdn2(**x, chunk_size=chunk_size, return_intermediate_states=True)
    for n in range(states.shape[1]):
        part = {name: t if name == "initial_state" else t[:, : n * chunk_size] for name, t in x.items()}
        assert relative_error(states[:, n], definition(**part)[1]) < 1e-10


@pytest.mark.parametrize(("most", "angles", "growth"), [(1.0, (24, 66), 1e3), (2.0, (116, 26), 8e5)], ids=["1", "2"])
def test_two_keys_in_turn_that_let_the_state_grow(most, angles, growth):
    """The worst case without decay: two tokens stretch the state by 1.25, or by 1.6 with b to 2. Results stay finite,
    and float64 agrees with the definition."""
    turn = torch.tensor(angles, dtype=torch.float64).deg2rad()
    k = torch.stack([turn.cos(), turn.sin()], 1).repeat(32, 1).view(1, 64, 1, 2)
    b = torch.tensor([[0.0, most], [most, 0.0]], dtype=torch.float64).repeat(32, 1).view(1, 64, 1, 2)
    one = torch.ones(1, 64, 1, 2, dtype=torch.float64)
    x = {"q": k, "k": k, "v": one, "g": 0 * one, "b": b, "w": one, "initial_state": torch.eye(2).double()[None, None]}
    want = definition(**x)
    assert want[1].norm() > growth
    for got, t in zip(chunk_gdn2(**x, output_final_state=True), want, strict=True):
        assert relative_error(got, t) < 1e-10
    half = {name: t.bfloat16() for name, t in x.items()}
    assert all(t.isfinite().all() for t in chunk_gdn2(**half, output_final_state=True))


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_how_far_an_erase_stretches_a_state(most):
    x = draw(T=30, most=most)
    k = x["k"] * torch.rand_like(x["k"][..., :1]) * 2  # of any length
    k[0, 0] = 0
    unit = torch.eye(k.shape[3], dtype=torch.float64)
    keys = k.repeat_interleave(2, 2)
    want = torch.linalg.matrix_norm(unit - keys[..., None] * (x["b"] * keys)[..., None, :], 2)
    assert_accurate("norm", flash_delta.erase_norm(k, x["b"]), want, torch.float64)
    assert flash_delta.erase_norm(x["k"], x["b"]).max() <= (2.0 if most == 2.0 else 4 / 3) ** 0.5 + 1e-9
    half = flash_delta.erase_norm(k.bfloat16(), x["b"].bfloat16())
    assert half.dtype == torch.float32
    assert relative_error(half, want) < 1e-2
    with pytest.raises(ValueError, match=r"erase_norm: expected k .* and b .*, got "):
        flash_delta.erase_norm(k, x["b"][:, :, :3])


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_a_guarded_erase_lets_no_state_grow(most):
    """No token stretches what it decays, as far as b goes. A token that does not need the guard keeps its b."""
    x = draw(T=200, H=2, HV=4, most=most, decay=0.3)
    x["b"], x["g"] = most * x["b"].mul(2).clamp(max=1), x["g"].clamp(max=-0.01)
    x["k"] = x["k"] * (0.2 + 0.8 * torch.rand_like(x["k"][..., :1]))  # shorter than 1
    x["k"][0, 0] = 0
    guarded = flash_delta.guard_erase(*kbg(x))
    before, after = (flash_delta.erase_norm(x["k"], b) * x["g"].amax(-1).exp() for b in (x["b"], guarded))
    grows = before > 1
    assert 0.1 < grows.double().mean() < 0.9
    assert after[grows].sub(1).abs().max() < 1e-9, "as far as the bound"
    assert after.max() < 1 + 1e-9
    assert torch.equal(guarded[~grows], x["b"][~grows])
    mean = partial(torch.einsum, "bthk,bthk->bth", x["k"].repeat_interleave(2, 2).square())
    assert relative_error(mean(guarded), mean(x["b"])) < 1e-12
    assert guarded.min() >= 0
    assert guarded.max() <= most


@pytest.mark.parametrize("case", ["growing", "growing-to-2"])
@pytest.mark.parametrize("decay", [0.0, -0.02, -0.1])
def test_the_worst_case_does_not_grow_under_the_guard(case, decay):
    """Token by token, a state is never larger than it was. Without the guard it grows."""
    case = next(c for c in CASES if c.name == case)
    x = {n: t.detach() for n, t in make_inputs(case, MEMBERS["gdn2"], torch.float64).items() if torch.is_tensor(t)}
    x["g"], x["w"] = x["g"] + decay, torch.zeros_like(x["w"])
    end = {}
    for name, b in (("free", x["b"]), ("guarded", flash_delta.guard_erase(*kbg(x)))):
        norms, S = [torch.linalg.matrix_norm(x["initial_state"], 2)], x["initial_state"]
        for t in range(case.T):
            token = {n: y[:, t : t + 1] for n, y in (x | {"b": b}).items() if n != "initial_state"}
            _, S = fused_recurrent_gdn2(**token, initial_state=S, output_final_state=True)
            norms.append(torch.linalg.matrix_norm(S, 2))
        end[name] = torch.stack(norms)
    assert end["guarded"].diff(dim=0).max() < 1e-12
    assert end["free"].diff(dim=0).max() > 1e-3


def test_gradients_of_the_guard():
    """Also where it keeps nothing of b's spread, where b is its mean, and where a decay is too steep to matter."""
    x = draw(B=1, T=12, HV=2, H=1, K=5, most=2.0, decay=0.1)
    x["g"][:, 6:8, :, 0] = 0
    x["b"][:, 2] = 0.5
    x["g"][:, 3] = -1000.0
    x["k"][:, 4] = 0
    leaves = [t.requires_grad_() for t in kbg(x)]
    steep = leaves[0], leaves[1], leaves[2]
    gradients = torch.autograd.grad(flash_delta.guard_erase(*steep).square().sum(), leaves)
    assert all(t.isfinite().all() for t in gradients)
    smooth = [t.detach()[:, [0, 1, 3, 5, 8, 9, 10, 11]].requires_grad_() for t in leaves]
    changed = (flash_delta.guard_erase(*smooth) != smooth[1]).any(-1)
    assert 0 < changed.sum() < changed.numel()
    torch.autograd.gradcheck(flash_delta.guard_erase, smooth)


def test_the_guard_in_other_dtypes_and_its_refusals():
    x = draw(most=2.0, decay=0.1)
    want = flash_delta.guard_erase(*kbg(x))
    half = [t.bfloat16() for t in kbg(x)]
    got = flash_delta.guard_erase(*half)
    assert got.dtype == torch.float32
    assert relative_error(got, flash_delta.guard_erase(*(t.double() for t in half))) < 1e-5
    assert relative_error(got, want) < 2e-2
    with pytest.raises(ValueError, match=r"guard_erase: expected k .* and b and g .*, got \[2, 75, 2, 8\] and "):
        flash_delta.guard_erase(x["k"], x["b"], x["g"][..., 0])


def kbg(x):
    return x["k"], x["b"], x["g"]


def test_saturated_gates_have_finite_gradients():
    """A bounded gate with a rate of e^80: 0 times infinity would be NaN."""
    x = draw(B=1, T=20, dtype=torch.float32) | {"A_log": torch.full((4,), 80.0), "dt_bias": torch.randn(32)}
    x["g"] = torch.randn_like(x["g"])
    x = {name: t.requires_grad_() for name, t in x.items()}
    o, _ = chunk_gdn2(**x, use_gate_in_kernel=True, lower_bound=-5.0)
    for name, t in zip(x, torch.autograd.grad(o.square().sum(), x.values()), strict=True):
        assert t.isfinite().all(), name


def test_hopper_refuses_it():
    x = draw(B=1, T=5, dtype=torch.float32)
    assert explain(chunk_gdn2, **x).backend == "torch"
    with pytest.raises(ValueError, match="chunk_gdn2: backend 'hopper' cannot run this: "):
        chunk_gdn2(**x, backend="hopper")
    serving = {name: t.to("meta") if torch.is_tensor(t) else t for name, t in make_call("gdn2").items()}
    with pytest.raises(ValueError, match="decode_gdn2: no backend can run this"):
        flash_delta.decode_gdn2(**serving)


@BACKENDS
@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
@pytest.mark.parametrize("kind", ["gdn2", "gdn2-raw"])
def test_decoding(kind, v_first, backend):
    """Drafts whose states are all kept, a last state alone, a tree."""
    x = make_call(kind, H=2, HV=4, v_first=v_first)
    check_decode(kind, x | {"write_indices": slots([3, 1], x), "scale": 0.3}, backend)
    x["write_indices"] = slots([[3, 4, 5], [1, 8, 6]], x)
    check_decode(kind, x, backend)
    check_decode(kind, x | {"parent_idx": slots([[-1, 0, 0], [-1, -1, 1]], x)}, backend)


@BACKENDS
@pytest.mark.parametrize("kind", ["gdn2", "gdn2-raw"])
def test_a_layer_around_decoding(kind, backend):
    x, conv = make_step(kind, H=2, HV=4)
    check_step(kind, x | {"write_indices": slots([[0, 4, 5], [1, 8, 6]], x)}, conv, backend)


@BACKENDS
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", ["gdn2", "gdn2-raw"])
def test_prompts(kind, invariant, backend):
    dtype = torch.float64 if backend == "torch" else torch.float32
    x = make_prefill(kind, (70, 0, 3, 130), dtype=dtype, pool=dtype) | {"batch_invariant": invariant}
    every = {"checkpoint_every": 64, "checkpoint_indices": slots([[9, -1], [-1, -1], [-1, -1], [8, -1]], x)}
    check_prefill(kind, x | every, backend)
    x = make_prompts(kind, (70, 1, 0, 20), H=2, HV=4) | {"batch_invariant": invariant}
    check_prompts(kind, x, backend)


@BACKENDS
def test_decoding_continues_a_short_prompt_bit_by_bit(backend):
    """Both give the bits of one call of the recurrent op with states in the pool's layout."""
    x = make_call("gdn2", B=1, T=9)
    tokens = {name: x[name] for name in ("q", "k", "v", "g", "b", "w")}
    states = {"initial_state": x["state_pool"][:1].clone(), "output_final_state": True, "state_v_first": True}
    want, state = fused_recurrent_gdn2(**tokens, **states, backend=backend)
    pool, o = x["state_pool"].clone(), []
    at = {"state_pool": pool, "read_indices": slots([0], x), "write_indices": slots([0], x), "state_v_first": True}
    at["backend"] = backend
    first = {name: t[:, :5] for name, t in tokens.items()}
    o.append(flash_delta.prefill_gdn2(**first, **at, cu_seqlens=slots([0, 5], x)))
    o += [flash_delta.decode_gdn2(**{n: y[:, t : t + 1] for n, y in tokens.items()}, **at) for t in range(5, 9)]
    assert torch.equal(torch.cat(o, 1), want)
    assert torch.equal(pool[:1], state)
