"""What docs/guide/transforms.md says: who may look at a call, and who is refused; and what tensors without values, axes
of no length and a NaN give."""

import os
import re
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from tiny_layers import DELTA_LAYERS, D, random
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import flash_delta
from flash_delta import modules
from flash_delta.layers import Attention
from flash_delta.layers.state import MixerState
from flash_delta.testing import CASES, MEMBERS, make_inputs, run

BY_NAME = {case.name: case for case in CASES}
MEMBER = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
B, T, H, K = 2, 5, 2, 8


# torch's own, on loading its forward-mode formulas
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def rand(*shape):
    """In (0, 1), and nothing random: vmap would object."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).sin().abs().reshape(shape)


def rule(q, backend=None):
    """A function of one tensor [B, T, H, K]."""
    g, beta = -rand(*q.shape[:3]).to(q.dtype), rand(*q.shape[:3]).to(q.dtype)
    v = rand(*q.shape).to(q.dtype)
    options = {"use_qk_l2norm_in_kernel": True, "backend": backend}
    return flash_delta.chunk_gated_delta_rule(q, q.cos(), v, g, beta, **options)[0]


def steps(q, backend=None):
    g, beta = -rand(*q.shape), rand(*q.shape[:3])
    return flash_delta.fused_recurrent_kda(q, q, rand(*q.shape), g, beta, use_qk_l2norm_in_kernel=True)[0]


def norm(q, backend=None):
    return modules.gated_rms_norm(q, q.cos(), rand(q.shape[-1]).to(q.dtype), 1e-5, "silu", backend)


def convolution(q, backend=None):
    return modules.causal_conv1d(q.flatten(-2), rand(H * K, 4).to(q.dtype), backend=backend)[0]


def gate(q, backend=None):
    return flash_delta.fused_kda_gate(q, rand(H).to(q.dtype), rand(H * K).to(q.dtype), None, q.dtype, backend=backend)


RULES = {"chunks": rule, "steps": steps}
AROUND = {"norm": norm, "convolution": convolution, "gate": gate}
TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q)[1](torch.ones_like(f(q)))[0],
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "vmap": lambda f, q: torch.func.vmap(f)(torch.stack([q, q])),
    "hessian": lambda f, q: torch.func.hessian(lambda q: f(q).sum())(q),
}
TRANSFORM = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@TRANSFORM
@pytest.mark.parametrize("f", RULES.values(), ids=RULES)
def test_the_rule_refuses_torch_func(f, transform):
    with pytest.raises(ValueError, match=r"q: expected a tensor outside of torch\.func .*, got one inside of it"):
        transform(f, rand(B, T, H, K))


@TRANSFORM
@pytest.mark.parametrize("f", AROUND.values(), ids=AROUND)
def test_what_is_around_it_takes_torch_func(f, transform):
    """On the backend torch: PyTorch's own operations."""
    transform(f, rand(B, T, H, K))


def test_around_the_rule_torch_func_finds_what_autograd_finds():
    for f in AROUND.values():
        q = rand(B, T, H, K).requires_grad_()
        (want,) = torch.autograd.grad(f(q).sum(), q)
        torch.testing.assert_close(TRANSFORMS["grad"](f, q.detach()), want)
        batch = TRANSFORMS["vmap"](f, q.detach())
        torch.testing.assert_close(batch, torch.stack([f(q), f(q)]).detach())


@interpreted
@TRANSFORM
@pytest.mark.parametrize("f", [rule, *AROUND.values()])
def test_kernels_refuse_torch_func(f, transform):
    with pytest.raises(ValueError, match=r"(q|x|g): expected a tensor outside of torch\.func"):
        transform(partial(f, backend="triton"), torch.rand(B, T, H, K))


@pytest.mark.parametrize("f", [rule, pytest.param(partial(norm, backend="triton"), marks=interpreted)])
def test_forward_mode_is_refused(f):
    """A kernel reads the number and not its tangent: the derivative would be zero."""
    q = torch.rand(B, T, H, K)
    with forward_ad.dual_level():
        f(q)  # a level alone is nothing
        with pytest.raises(ValueError, match=r"(q|x): expected a tensor without a tangent"):
            f(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_torch_func_is_refused_while_compiling(name):
    """An operator's tangent would be zero, says torch without a word."""
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"q: expected a tensor outside of torch\.func"):
        torch.compile(partial(TRANSFORMS[name], rule), backend="aot_eager")(rand(B, T, H, K))


@pytest.mark.parametrize(
    "f",
    [
        rule,
        steps,
        pytest.param(partial(norm, backend="triton"), marks=interpreted),
        pytest.param(partial(convolution, backend="triton"), marks=interpreted),
        pytest.param(partial(gate, backend="triton"), marks=interpreted),
    ],
    ids=["chunks", "steps", "norm", "convolution", "gate"],
)
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["linear", "square"])
def test_a_second_derivative_is_refused(f, loss):
    """Also that of a linear loss, whose first derivative autograd would take for a constant."""
    q = rand(B, T, H, K).to(torch.float64 if f in (rule, steps) else torch.float32).requires_grad_()
    total = loss(f(q))
    (d,) = torch.autograd.grad(total, q, create_graph=True)
    for ask in (
        lambda: torch.autograd.grad(d.square().sum(), q, retain_graph=True),
        lambda: (total + d.square().sum()).backward(),
    ):
        with pytest.raises(RuntimeError, match="a second derivative is asked for, and its backward pass has no"):
            ask()


def test_a_graph_of_the_gradient_that_nobody_walks_is_none_of_our_business():
    q = rand(B, T, H, K).requires_grad_()
    (want,), (d,) = (torch.autograd.grad(rule(q).sum(), q, create_graph=create) for create in (False, True))
    assert torch.equal(want, d)
    assert d.requires_grad


@pytest.mark.parametrize("f", AROUND.values(), ids=AROUND)
def test_second_derivatives_around_the_rule(f):
    assert torch.autograd.gradgradcheck(f, rand(1, 3, H, K).requires_grad_())


@pytest.mark.parametrize("f", [rule, *AROUND.values()], ids=["rule", *AROUND])
def test_gradcheck(f):
    assert torch.autograd.gradcheck(f, rand(1, 3, H, K).requires_grad_())


def test_torch_export():
    layer, x = DELTA_LAYERS["gdn-grouped"]().double().requires_grad_(False), random(2, 9, D)
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict).module()
        torch.testing.assert_close(exported(x), layer(x))


def test_data_parallel(tmp_path):
    """One process: what its hooks do to a backward pass does not depend on how many there are."""
    layer, x = DELTA_LAYERS["kda"](), random(2, 9, D).float()
    want = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(layer)(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(p.grad, d) for p, d in zip(layer.parameters(), want, strict=True))


def test_the_page_names_what_is_refused():
    page = (Path(__file__).parent.parent / "docs/guide/transforms.md").read_text()
    rows = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if row.startswith("| ")}
    assert all(name in next(row for row in rows if "torch.func" in row) for name in TRANSFORMS)


def test_gradients_of_other_sequences_have_no_nan():
    x, _, (start, stop) = with_nan("gdn", "k")
    x = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in x.items()}
    flash_delta.chunk_gated_delta_rule(**x)[0].sum().backward()
    for name in ("q", "k", "v", "g", "beta"):
        d = x[name].grad
        assert not d[:, :start].isnan().any()
        assert not d[:, stop:].isnan().any()
        assert not d[:, :, 1].isnan().any(), "the other head"
        assert d[:, start:stop, 0].isnan().any()


# Tensors without values

CALLS = {name: replace(BY_NAME[name], T=70 if name != "packed" else 205) for name in ("in-kernel", "packed", "saved")}


def results_of(member, x):
    out = member.op(**x)
    leaves = [t for t in x.values() if torch.is_tensor(t) and t.requires_grad]
    return (*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), leaves))


def described(tensors):
    return [(t.shape, t.dtype) for t in tensors]


@pytest.mark.parametrize("case", CALLS)
@MEMBER
def test_fake_tensors_have_the_shapes_of_real_ones(member, case):
    x = make_inputs(CALLS[case], member, torch.float32)
    want = described(results_of(member, x))
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(t) if torch.is_tensor(t) else t for n, t in x.items()}
        got = results_of(member, fake)
    assert all(isinstance(t, FakeTensor) for t in got)
    assert described(got) == want
    assert described(results_of(member, fake)) == want, "outside of the mode"
    with pytest.raises(ValueError, match="k: expected a tensor"), mode:
        member.op(**fake | {"k": fake["k"][..., :4]})


@pytest.mark.parametrize("case", CALLS)
@MEMBER
def test_meta_tensors_have_the_shapes_of_real_ones(member, case):
    """A packed row's bounds have to be on the host for it."""
    x = make_inputs(CALLS[case], member, torch.float32)
    want = described(results_of(member, x))
    meta = {n: t.detach().to("meta").requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for n, t in x.items()}
    if "cu_seqlens" in x:
        meta["cu_seqlens_cpu"] = x["cu_seqlens"]
    for device in ("cpu", "meta"):
        with torch.device(device):
            got = results_of(member, meta)
        assert all(t.is_meta for t in got)
        assert described(got) == want


@pytest.mark.parametrize("case", ["ragged", "packed"])
@MEMBER
def test_a_default_device_changes_nothing(member, case):
    """What an op makes for itself lies where its tensors lie."""
    x = make_inputs(BY_NAME[case] if case == "packed" else BY_NAME["short"], member, torch.float32)
    torch.manual_seed(0)
    want = run(member, x)
    with torch.device("meta"):
        flash_delta.reference.chunked._layout.cache_clear()
        torch.manual_seed(0)
        out = member.op(**x)
    assert torch.equal(out[0], want["o"])
    assert torch.equal(out[1], want["final_state"])


def serve(kind, device="cpu", **changes):
    """A call of the serving ops by shapes."""
    kda, decode, gates = not kind.endswith("rule"), "decode" in kind, kind.endswith("gdn2")
    b, t = (3, 2) if decode else (1, 70)
    f, i = partial(torch.rand, device=device), partial(torch.arange, dtype=torch.int32, device=device)
    x = {
        "q": f(b, t, H, K), "k": f(b, t, H, K), "v": f(b, t, H, 16),
        **({"b": f(b, t, H, K), "w": f(b, t, H, 16)} if gates else {"beta": f(b, t, H)}),
        "g": -f(b, t, H, K) if kda else -f(b, t, H), "state_pool": torch.zeros(4, H, K, 16, device=device),
        "read_indices": i(3), "write_indices": i(3), "state_v_first": False,
    }  # fmt: skip
    x |= {} if decode else {"cu_seqlens": torch.tensor([0, 3, 3, 70], device=device)}
    return getattr(flash_delta, kind)(**x | changes)


SERVING = [f"{way}_{rule}" for way in ("decode", "prefill") for rule in ("gated_delta_rule", "kda", "gdn2")]


@pytest.mark.parametrize("kind", SERVING)
def test_serving_without_values(kind):
    """Fake tensors have shapes and checks; on "meta" nothing could read an index."""
    shape = serve(kind).shape
    with FakeTensorMode():
        o = serve(kind)
        assert isinstance(o, FakeTensor)
        assert o.shape == shape
        with pytest.raises(ValueError, match="state_pool: expected a tensor"):
            serve(kind, state_pool=torch.zeros(4, H, K, 15))
    with pytest.raises(ValueError, match="it reads the indices of slots on the host, but they are on meta"):
        serve(kind, "meta")
    with torch.device("meta"):
        assert serve(kind, "cpu").device.type == "cpu"
    with pytest.raises(ValueError, match=r"q: expected a tensor outside of torch\.func"):
        torch.func.vmap(lambda q: serve(kind, q=q), randomness="same")(torch.ones(2, *shape[:3], K))


LAYERS = {**DELTA_LAYERS, "attention": lambda: Attention(D, 2)}


@pytest.mark.parametrize("mask", ["none", "mask", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_values(name, mask):
    given = {}
    if mask == "mask":
        given["attention_mask"] = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    if mask == "packed":
        given["cu_seqlens"] = torch.tensor([0, 4, 9])
    rows = 1 if mask == "packed" else 2
    with FakeTensorMode() as mode:
        layer, x = LAYERS[name](), torch.randn(rows, 9, D)
        y = layer(x, **{n: mode.from_tensor(t) for n, t in given.items()})
        y.sum().backward()
    assert isinstance(y, FakeTensor)
    assert y.shape == x.shape
    assert all(p.grad.shape == p.shape for p in layer.parameters())
    x = torch.randn(rows, 9, D)
    meta = LAYERS[name]().to("meta")
    if mask == "none" or name == "attention":
        y = meta(x.to("meta"), **{n: t.to("meta") for n, t in given.items()})
        assert y.shape == x.shape
        y.sum().backward()
    else:
        with pytest.raises(ValueError, match="it plans packed sequences on the host, but cu_seqlens is on meta"):
            meta(x.to("meta"), **{n: t.to("meta") for n, t in given.items()})


@pytest.mark.parametrize("name", LAYERS)
def test_layers_refuse_another_width(name):
    with pytest.raises(ValueError, match=re.escape(f"hidden_states: expected shape [B, T, {D}], got [2, 5, {D + 1}]")):
        LAYERS[name]()(torch.randn(2, 5, D + 1))


# Axes of no length


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}], ids=str)
@MEMBER
def test_no_rows_and_no_tokens(member, sizes):
    case = replace(BY_NAME["in-kernel"], **sizes)
    x = make_inputs(case, member, torch.float32)
    o, state, *gradients = results_of(member, x)
    assert o.shape == (case.B, case.T, case.HV, case.V)
    assert state.shape == (case.B, case.HV, case.K, case.V)
    leaves = [t for t in x.values() if torch.is_tensor(t) and t.requires_grad]
    assert described(gradients) == described(leaves)
    assert not any(t.isnan().any() for t in gradients)


@pytest.mark.parametrize("sizes", [{"K": 0}, {"V": 0}, {"H": 0, "HV": 0}, {"HV": 0}], ids=str)
@MEMBER
def test_no_heads_and_no_channels(member, sizes):
    x = make_inputs(replace(BY_NAME["in-kernel"], **sizes), member, torch.float32)
    with pytest.raises(ValueError, match=r"[qv]: expected at least one head and one channel \(axes 2 and 3\), got"):
        member.op(**x)


@pytest.mark.parametrize("shape", [(0, 3, K), (2, 0, K), (2, 3, 0)], ids=str)
def test_norms_and_convolutions_of_nothing(shape):
    x = torch.zeros(shape, requires_grad=True)
    width = shape[-1]
    y = modules.rms_norm(x, torch.ones(width), 1e-5)
    z = modules.gated_rms_norm(x, x, torch.ones(width), 1e-5, "silu")
    o, state = modules.causal_conv1d(x, torch.ones(width, 4), output_final_state=True)
    token = modules.causal_conv1d_update(
        x[:, :1].flatten(0, 1), state[: x[:, :1].flatten(0, 1).shape[0]].clone(), torch.ones(width, 4)
    )
    (y.sum() + z.sum() + o.sum() + state.sum()).backward()
    assert y.shape == z.shape == o.shape == x.grad.shape == shape
    assert state.shape == (shape[0], width, 4)
    assert token.shape[-1] == width
    with pytest.raises(ValueError, match="weight: expected at least one tap"):
        modules.causal_conv1d(x, torch.ones(width, 0))


@pytest.mark.parametrize("name", DELTA_LAYERS)
def test_layers_of_no_tokens(name):
    layer = DELTA_LAYERS[name]()
    for shape in ((2, 0, D), (0, 3, D)):
        x, state = torch.zeros(shape, requires_grad=True), MixerState()
        y = layer(x, state=state)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert state.recurrent.shape[0] == shape[0]
    with pytest.raises(ValueError, match="expand_v: expected a positive number, got 0"):
        type(layer)(D, expand_v=0)


# What a NaN reaches (docs/guide/troubleshooting.md)

NANS = [
    *(
        (name, which, "torch")
        for name in ("gdn", "kda", "gdn-recurrent", "kda-recurrent")
        for which in ("q", "k", "v", "beta", "g")
    ),
    *((name, which, "torch") for name in ("gdn2", "gdn2-recurrent") for which in ("q", "k", "v", "b", "w", "g")),
    *(
        pytest.param(name, which, "triton", marks=interpreted)
        for name in ("gdn", "kda", "gdn-recurrent")
        for which in ("v", "g")
    ),
    *(
        pytest.param(name, which, "triton", marks=(interpreted, pytest.mark.long))
        for name in ("gdn", "kda", "gdn-recurrent")
        for which in ("q", "k", "beta")
    ),
]


def with_nan(name, which=None):
    """Three packed sequences, the second one longer than a chunk; ``which`` is NaN in its token ``t``, in the first of
    two heads. Also ``t``, and the second sequence's bounds."""
    torch.manual_seed(0)
    start, stop, T = (2, 10, 12) if "recurrent" in name else (2, 70, 72)
    x = {n: torch.randn(1, T, 2, K) for n in ("q", "k", "v")}
    x |= {"g": -torch.rand(1, T, 2, *(() if MEMBERS[name].gate == "scalar" else (K,)))}
    widths = {"b": (K,), "w": (K,)} if MEMBERS[name].channel_strength else {"beta": ()}
    x |= {n: torch.rand(1, T, 2, *width) for n, width in widths.items()}
    if which is not None:
        x[which][:, stop - 3, 0] = float("nan")
    return x | {"cu_seqlens": torch.tensor([0, start, stop, T])}, stop - 3, (start, stop)


@lru_cache
def results_with_nan(name, backend, which=None):
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "backend": backend}
    return MEMBERS[name].op(**with_nan(name, which)[0], **options)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(("name", "which", "backend"), NANS)
def test_what_a_nan_reaches(name, which, backend):
    _, t, (start, stop) = with_nan(name, which)
    clean, clean_state = results_with_nan(name, backend)
    o, state = results_with_nan(name, backend, which)
    first = t if "recurrent" in name or which == "q" else start + 64
    last = t + 1 if which == "q" else stop
    assert torch.equal(o[:, :, 1], clean[:, :, 1]), "the other head"
    assert torch.equal(state[:, 1], clean_state[:, 1]), "the other head"
    assert torch.equal(o[:, :first], clean[:, :first]), "tokens before its chunk, and the sequence before"
    assert torch.equal(o[:, last:], clean[:, last:]), "behind it"
    keep = [0, 1, 2] if which == "q" else [0, 2]
    assert torch.equal(state[keep], clean_state[keep])
    if which == "g" and backend == "triton":
        assert_forgotten(name, o, state)
        return
    assert o[:, t:last, 0].isnan().all()
    assert which == "q" or state[1, 0].isnan().any()


def assert_forgotten(name, o, state):
    """Kernels may take the decay for one to nothing; that of decoding with one decay per head does not."""
    if name == "gdn-recurrent":
        assert state[1, 0].isnan().all()
        return
    x, t, _ = with_nan(name)
    x["g"][:, t, 0] = -float("inf")
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "backend": "triton"}
    for got, want in zip((o, state), MEMBERS[name].op(**x, **options), strict=True):
        assert torch.equal(got, want)
