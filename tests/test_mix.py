"""A mixer as one op: against its parts in float64, in every layout, and what of it has a gradient.

Without a GPU in Triton's interpreter.
"""

from copy import deepcopy

import pytest
import torch
from functorch.compile import make_boxed_func
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.layers._plain import adjoining, let_adjoin, project_jointly
from flash_delta.ops._mixing import function
from flash_delta.ops.mixer import Layout, Place, mix
from flash_delta.problem import ENVIRONMENT

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
H, HV, K, V, T, W = (2, 4, 64, 64, 333, 4) if GPU else (2, 4, 32, 32, 73, 4)
BOUNDS = (0, 3, 3, 70, T - 2)  # of a packed row: tokens after the last one belong to no sequence


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(gate="scalar", gated=True, N=1, rows=1, taps=2):
    """Tensors by name, in float64. ``taps``: axes of the convolutions' weights."""
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K) if gate == "channel" else (HV,), "beta": (HV,)}
    shapes |= {"z": (HV, V)} if gated else {}
    x = {name: random(rows, T, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    for i, D in enumerate((H * K, H * K, HV * V)):
        x[f"taps{i}"] = random(D, *(1,) * (taps - 2), W, seed=20 + i, scale=0.5)
    x |= {"A_log": random(HV, seed=30), "dt_bias": random(HV * (K if gate == "channel" else 1), seed=31)}
    return x | {"norm_weight": 1 + random(V, seed=32, scale=0.1)}


def run(x, dtype, *, layout=None, frozen=(), backend="triton", **options):
    """y and the gradients of all tensors that are not frozen."""
    leaves = {name: t.to(DEVICE, dtype).requires_grad_(name not in frozen) for name, t in x.items()}
    taps = leaves["taps"] if "taps" in leaves else tuple(leaves[f"taps{i}"] for i in range(3))
    projected = leaves["projected"] if layout else tuple(leaves.get(name) for name in ("q", "k", "v", "g", "beta", "z"))
    if not layout and leaves.get("z") is None:
        options["norm_activation"] = None
    rest = (leaves[name] for name in ("A_log", "dt_bias", "norm_weight"))
    y = mix(projected, taps, *rest, layout=layout, backend=backend, **options)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    dy = random(*y.shape, seed=50).to(DEVICE, dtype)
    return y.detach(), dict(zip(wanted, torch.autograd.grad(y, [*wanted.values()], dy), strict=True))


def packed(x, gated=True):
    """Returns the tensors with one packed projection, and its layout."""
    names = ("q", "k", "v", *(("z",) if gated else ()), "g", "beta")
    rest = {name: t for name, t in x.items() if name not in names}
    projected = torch.cat([x[name].flatten(2) for name in names], -1)
    return rest | {"projected": projected}, Layout.adjoining(H, HV, K, V, (names,))


def split(d, gated=True):
    """Gradients of packed tensors as those of their parts."""
    sizes = {"q": H * K, "k": H * K, "v": HV * V} | ({"z": HV * V} if gated else {}) | {"g": HV, "beta": HV}
    parts = dict(zip(sizes, d["projected"].split([*sizes.values()], -1), strict=True))
    if "taps" in d:
        parts |= zip(("taps0", "taps1", "taps2"), d["taps"].split([H * K, H * K, HV * V]), strict=True)
    return {name: t for name, t in d.items() if name not in ("projected", "taps")} | parts


def assert_close(name, got, want):
    """Three parts one after the other, each in float32."""
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < 5e-6, f"{name}: relative L2 error {error:.2e}"


def assert_same(got, want):
    (y, d), (true, true_d) = got, want
    assert_close("y", y, true)
    for name, t in true_d.items():
        assert_close(name, d[name].reshape(t.shape), t)


@pytest.fixture
def parts_refused(monkeypatch):
    """Fails if the parts run as ops of their own."""

    def refuse(*_):
        raise AssertionError("the parts ran as ops of their own")

    def allow(backend="torch", **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(function, "_run_parts", run_parts)
            return options.pop("run")(backend=backend, **options)

    run_parts = function._run_parts
    monkeypatch.setattr(function, "_run_parts", refuse)
    return allow


def truth(allow, x, **options):
    return allow(run=lambda backend: run(x, torch.float64, backend=backend, **options))


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.parametrize("gate", ["scalar", "channel"])
def test_separate_projections(parts_refused, gate, bounds):
    x, options = inputs(gate, rows=1 if bounds else 2), {"gate": gate}
    if bounds:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    assert_same(run(x, torch.float32, **options), truth(parts_refused, x, **options))


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("taps", [2, 3, None], ids=["2", "3", "one"])
def test_packed_projection(parts_refused, gated, bounds, taps):
    """Taps are [D, W], [D, 1, W], or one tensor for q, k and v. Nine of the twelve take long; each value of an argument
    is in one of the others."""
    x, options = inputs(gated=gated, rows=1 if bounds else 2, taps=taps or 3), {"allow_neg_eigval": True}
    if bounds:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    together, layout = packed(x, gated)
    if taps is None:
        together["taps"] = torch.cat([together.pop(f"taps{i}") for i in range(3)])
    more = options | ({} if gated else {"norm_activation": None})
    y, d = run(together, torch.float32, layout=layout, **more)
    assert_same((y, split(d, gated)), truth(parts_refused, x, **options))
    same = run(x, torch.float32, **options)
    assert torch.equal(y, same[0])
    assert all(torch.equal(t.reshape(same[1][name].shape), same[1][name]) for name, t in split(d, gated).items())


def test_heads_apart(parts_refused):
    """Every head has numbers of others beside it, and the gradient goes between them."""
    x = inputs()
    # One value head per key head, so that all heads are equally far apart.
    one = {n: t[:, :, ::2] if n in ("v", "z", "g", "beta") else t for n, t in x.items()}
    one |= {"A_log": x["A_log"][::2], "dt_bias": x["dt_bias"][::2], "taps2": x["taps2"][: H * V]}
    heads = torch.cat([one["q"], one["k"], one["v"], one["z"], one["g"][..., None], one["beta"][..., None]], -1)
    size, offset, places = heads.shape[-1], 0, {}
    for name, width in (("q", K), ("k", K), ("v", V), ("z", V), ("g", 0), ("beta", 0)):
        places[name] = Place(offset, H, width, size)
        offset += max(width, 1)
    rest = {n: t for n, t in one.items() if n not in places}
    y, d = run(rest | {"projected": heads.flatten(2)}, torch.float32, layout=Layout(**places))
    true, true_d = truth(parts_refused, one)
    assert_close("y", y, true)
    found = d["projected"].view(1, T, H, size)
    for name, place in places.items():
        part = found[..., place.offset : place.offset + max(place.width, 1)]
        assert_close(name, part.reshape(true_d[name].shape), true_d[name])


@pytest.mark.parametrize("width", [V, 2 * V], ids=["one width", "wide values"])
def test_two_projections_with_groups_of_heads(parts_refused, width):
    """In Qwen3-Next a key head and its value heads adjoin in the first projection, their gates in the second."""
    x = inputs()
    x |= {"v": random(1, T, HV, width, seed=2), "z": random(1, T, HV, width, seed=5)}
    x |= {"taps2": random(HV * width, W, seed=22, scale=0.5), "norm_weight": 1 + random(width, seed=32, scale=0.1)}
    sources = ("q", "k", "v", "z"), ("beta", "g")
    projected = [torch.cat([x[n].reshape(1, T, H, -1) for n in names], -1) for names in sources]
    layout = Layout.adjoining(H, HV, K, width, sources, by_key_head=True)
    rest = {n: t for n, t in x.items() if n not in Layout._fields}
    leaves = {n: t.to(DEVICE, torch.float32).requires_grad_() for n, t in rest.items()}
    given = [t.flatten(2).to(DEVICE, torch.float32).requires_grad_() for t in projected]
    taps = [leaves[f"taps{i}"] for i in range(3)]
    parameters = (leaves[name] for name in ("A_log", "dt_bias", "norm_weight"))
    y = mix(given, taps, *parameters, layout=layout, backend="triton")
    dy = random(*y.shape, seed=50).to(DEVICE, torch.float32)
    d = torch.autograd.grad(y, [*given, *leaves.values()], dy)
    true, true_d = truth(parts_refused, x)
    assert_same((y.detach(), dict(zip(leaves, d[2:], strict=True))), (true, {n: true_d[n] for n in leaves}))
    for source, names in enumerate(sources):
        sizes = [true_d[n].reshape(1, T, H, -1).shape[-1] for n in names]
        for name, t in zip(names, d[source].view(1, T, H, -1).split(sizes, -1), strict=True):
            assert_close(name, t.reshape(true_d[name].shape), true_d[name])


def slices(x):
    """Returns the values as slices of wider tensors and with axes in another order."""
    moved = dict(x)
    for name in ("q", "k"):
        moved[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("v", "z"):
        wide = torch.zeros(*x[name].shape[:2], HV * x[name].shape[3] + 24, dtype=x[name].dtype)
        wide[..., 8 : 8 + HV * x[name].shape[3]] = x[name].flatten(2)
        moved[name] = wide[..., 8 : 8 + HV * x[name].shape[3]].unflatten(-1, (HV, -1))
    return moved


def with_layouts(x, dtype):
    """Leaves with the strides of ``x``."""
    found = {}
    for name, t in x.items():
        whole = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=dtype, device=DEVICE)
        found[name] = whole.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t).detach().requires_grad_()
    return found


@pytest.mark.parametrize("width", [V, 2 * V], ids=["one width", "wide values"])
def test_any_strides(parts_refused, width):
    x = inputs()
    x |= {"v": random(1, T, HV, width, seed=2), "z": random(1, T, HV, width, seed=5)}
    x |= {"taps2": random(HV * width, W, seed=22, scale=0.5), "norm_weight": 1 + random(width, seed=32, scale=0.1)}
    leaves = with_layouts(slices(x), torch.float32)
    tokens, taps = tuple(leaves[n] for n in ("q", "k", "v", "g", "beta", "z")), [leaves[f"taps{i}"] for i in range(3)]
    y = mix(tokens, taps, leaves["A_log"], leaves["dt_bias"], leaves["norm_weight"], backend="triton")
    dy = random(*y.shape, seed=50).to(DEVICE, torch.float32)
    d = dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], dy), strict=True))
    assert_same((y.detach(), d), truth(parts_refused, x))


def test_a_transposed_projection(parts_refused):
    x, layout = packed(inputs())
    turned = x | {"projected": x["projected"].transpose(1, 2).contiguous().transpose(1, 2)}
    for got, want in zip(run(turned, torch.float32, layout=layout), run(x, torch.float32, layout=layout), strict=True):
        for a, b in zip(got.values(), want.values(), strict=True) if isinstance(got, dict) else [(got, want)]:
            assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", ["taps0 taps1 taps2", "norm_weight", "A_log dt_bias", "projected"])
def test_frozen_tensors_have_no_gradient(parts_refused, frozen):
    x, layout = packed(inputs())
    frozen = frozen.split()
    y, d = run(x, torch.float32, layout=layout, frozen=frozen)
    want, all_d = run(x, torch.float32, layout=layout)
    assert torch.equal(y, want)
    assert d.keys() == all_d.keys() - {*frozen}
    assert all(torch.equal(t, all_d[name]) for name, t in d.items())


def test_no_tokens(parts_refused):
    x = {name: t[:, :0] if t.dim() > 2 else t for name, t in inputs().items()}
    y, d = run(x, torch.float32)
    assert y.shape == (1, 0, HV * V)
    assert all((t == 0).all() for t in d.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": "narrow"}, "projected: expected the layout's width"),
        ({"layout": "gap"}, "beta: expected a tensor"),
        ({"layout": "twice"}, "layout: expected heads that cover each token once"),
        ({"layout": "uneven"}, "layout: expected groups of v that adjoin"),
        ({"norm_eps": -1.0}, "eps: expected"),
        ({"lower_bound": 3.0}, "lower_bound: expected"),
        ({"gate": "vector"}, "gate: expected 'scalar' or 'channel', got 'vector'"),
        ({"norm_activation": None}, "norm_activation: expected 'silu' or 'sigmoid', got None"),
    ],
)
def test_bad_input(change, message):
    x, layout = packed(inputs())
    if change.get("projected"):
        x["projected"] = x["projected"][..., 1:]
    match change.get("layout"):
        case "gap":
            layout = layout._replace(beta=None, g=Place(layout.g.offset, 2 * HV, 0, 1))
        case "twice":
            layout = layout._replace(k=layout.q)
        case "uneven":
            layout = layout._replace(v=layout.v._replace(together=HV - 1))
    options = {name: value for name, value in change.items() if name not in ("projected", "layout")}
    with pytest.raises(ValueError, match=message):
        run(x, torch.float32, layout=layout, **options)


@pytest.mark.parametrize("sources", [(("q", "k", "v", "z"),), (("q", "k", "v", "g", "beta", "q"),), (("o",),)])
def test_bad_sources(sources):
    with pytest.raises(ValueError, match="sources: expected each of q, k, v, g and beta once, and maybe z, got"):
        Layout.adjoining(H, HV, K, V, sources)


LAYERS = {
    "gdn": lambda: GatedDeltaNet(hidden_size=48, num_heads=H, num_v_heads=HV, head_dim=K, expand_v=1),
    "kda": lambda: KimiDeltaAttention(hidden_size=48, num_heads=H, num_v_heads=HV, head_dim=K),
}


@pytest.mark.parametrize("member", LAYERS)
def test_a_layer_mixes(monkeypatch, member):
    """Its compiled graph has one operator each way, and both have the gradients of the parts in float64."""
    monkeypatch.setenv(ENVIRONMENT, "triton")
    torch.manual_seed(0)
    layer, x = LAYERS[member]().to(DEVICE), torch.randn(1, T, 48, device=DEVICE).requires_grad_()
    dy, graphs = torch.randn(1, T, 48, device=DEVICE), []

    def look(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "flash_delta" in str(node.target)])
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=look, bw_compiler=look)
    torch._dynamo.reset()
    tensors = [x, *layer.parameters()]
    eager = torch.autograd.grad(layer(x), tensors, dy)
    compiled = torch.autograd.grad(torch.compile(layer, backend=compiler, fullgraph=True)(x), tensors, dy)
    assert graphs == [["flash_delta.mix_forward.default"], ["flash_delta.mix_backward.default"]]
    monkeypatch.setenv(ENVIRONMENT, "torch")
    wide, wide_x = LAYERS[member]().to(DEVICE).double(), x.detach().double().requires_grad_()
    wide.load_state_dict(layer.state_dict())
    want = torch.autograd.grad(wide(wide_x), [wide_x, *wide.parameters()], dy.double())
    for got in (eager, compiled):
        for (name, _), a, b in zip([("x", x), *layer.named_parameters()], got, want, strict=True):
            assert_close(name, a, b)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("bounds", [None, (0, 1000, 1000, 1700, 2000)], ids=["whole", "packed"])
@pytest.mark.parametrize("member", LAYERS)
def test_a_layer_on_hopper(member, bounds):
    """In bfloat16, against the float64 layer; the same bits again."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "num_heads": 4, "num_v_heads": 8, "head_dim": 128}
    make = {"gdn": lambda: GatedDeltaNet(**shape, expand_v=1), "kda": lambda: KimiDeltaAttention(**shape)}[member]
    layer, x = make().cuda().bfloat16(), torch.randn(1, 2000, 256, device="cuda").bfloat16().requires_grad_()
    dy, cu = torch.randn_like(x), None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    found = [torch.autograd.grad(layer(x, cu_seqlens=cu), [x, *layer.parameters()], dy) for _ in range(3)]
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
    wide = make().cuda().double()
    wide.load_state_dict(layer.state_dict())
    wide_x = x.detach().double().requires_grad_()
    want = torch.autograd.grad(wide(wide_x, cu_seqlens=cu), [wide_x, *wide.parameters()], dy.double())
    for (name, _), a, b in zip([("x", x), *layer.named_parameters()], found[0], want, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        assert error < 0.02, (name, error)


def projections(kind=nn.Linear, **options):
    return [kind(48, n, bias=False, **options) for n in (16, 32)]


@pytest.mark.parametrize("trained", [True, False])
def test_one_product(trained):
    modules, x = projections(), torch.randn(2, 5, 48, requires_grad=True)
    for m in modules:
        m.requires_grad_(trained)
    y = project_jointly(modules, x)
    want = torch.cat([m(x) for m in modules], -1)
    assert torch.allclose(y, want, atol=1e-6)
    tensors, dy = [x, *(m.weight for m in modules if trained)], torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(t, tensors, dy) for t in (y, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_one_product_saves_no_copy_of_the_weights():
    modules, x, saved = projections(), torch.randn(2, 5, 48, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        project_jointly(modules, x)
    known = {t.untyped_storage().data_ptr() for t in (x, *(m.weight for m in modules))}
    assert {t.untyped_storage().data_ptr() for t in saved} <= known


def test_weights_that_adjoin(tmp_path):
    """Adjoining weights need no copy and give the same numbers, forward and backward. Other code sees the parameters as
    ever."""
    modules, x, dy = projections(), torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 48)
    weights = [m.weight for m in modules]
    before = [w.clone() for w in weights]

    def run():
        return torch.autograd.grad(project_jointly(modules, x), [x, *weights], dy)

    want = run()
    let_adjoin(modules)
    assert [m.weight for m in modules] == weights
    assert adjoining(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", None)
        assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))
        with torch.no_grad():
            assert project_jointly(modules, x).shape == dy.shape
    optimizer = torch.optim.AdamW(weights)
    project_jointly(modules, x).sum().backward()
    optimizer.step()
    assert adjoining(weights)
    save_file({str(i): w.detach() for i, w in enumerate(weights)}, tmp_path / "weights.safetensors")
    copies = [m.weight for m in deepcopy(modules)]
    assert not adjoining(copies)
    assert not adjoining(weights[1:] + weights[:1])
    assert not adjoining([weights[0], weights[0].T.contiguous().T])


class Adapter(nn.Linear):
    pass


@pytest.mark.parametrize("reason", ["subclass", "bias", "hook", "patched", "frozen", "no gradients"])
def test_projections_that_want_their_own_calls(reason):
    modules = projections(Adapter if reason == "subclass" else nn.Linear)
    x = torch.randn(2, 5, 48, requires_grad=True)
    if reason == "bias":
        modules[1] = nn.Linear(48, 32)
    if reason == "hook":
        modules[1].register_forward_hook(lambda *_: None)
    if reason == "patched":
        modules[1].forward = modules[1].forward
    if reason == "frozen":
        modules[1].weight.requires_grad_(False)
    with torch.set_grad_enabled(reason != "no gradients"):
        assert project_jointly(modules, x) is None


def test_one_product_under_autocast():
    modules, x = projections(), torch.randn(2, 5, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = project_jointly(modules, x), torch.cat([m(x) for m in modules], -1)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    y.sum().backward()
    assert all(m.weight.grad.dtype == torch.float32 for m in modules)
