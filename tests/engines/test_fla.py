"""fla's own functions and layers under `register`: values and gradients against float64 and against fla's own kernels.

On a CPU Triton's interpreter runs fla's kernels. On a GPU where fla refuses to train, these comparisons are skipped.
"""

import contextlib
import importlib
import inspect
import logging
import re
import warnings
from importlib.util import find_spec

import pytest
import torch
from fla_calls import HV, B, H, K, T, V, around, rules, with_gradients
from torch.nn import functional as F

from flash_delta.integrations.fla import install, register, unregister
from flash_delta.integrations.fla.takeover import layers
from flash_delta.integrations.fla.takeover.door import Door
from flash_delta.integrations.fla.takeover.table import TABLE
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import Workload
from workshop.bench.entry import Entry

if find_spec("triton") is None or find_spec("fla") is None:
    pytest.skip("it needs fla and Triton", allow_module_level=True)
CPU = not torch.cuda.is_available()
if CPU:
    from fla_interpreter import prepare, repair

    prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    fla = importlib.import_module("fla")
    importlib.import_module("fla.layers")
if CPU:
    repair()
if getattr(fla.__spec__, "origin", None) == "flash_delta":
    pytest.skip("this is flash_delta under fla's names", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # of fla's
MIXING = {"GatedDeltaNet", "KimiDeltaAttention"}  # layers that run as one op
BY_REGISTRY = {"chunk_gated_delta_rule", "chunk_kda", "fused_kda_gate", "causal_conv1d_update"}
BY_REGISTRY |= set() if fla.__version__ == "0.5.2" else {"fused_recurrent_simple_gla"}


def theirs(name):
    """The function where users of fla find it, each time: it is bound anew."""
    for path in (
        "fla.ops",
        "fla.ops.gdn2",
        "fla.ops.gated_delta_product",
        "fla.ops.gated_delta_rule.gate",
        "fla.ops.kda.gate",
        "fla.modules.convolution",
    ):
        if hasattr(importlib.import_module(path), name):
            return getattr(importlib.import_module(path), name)
    return fla.modules.FusedRMSNormGated.forward


@pytest.fixture
def report():
    with register() as found:
        yield found


@pytest.fixture(autouse=True)
def device():
    torch.manual_seed(0)
    with torch.device("cpu" if CPU else "cuda"):
        yield


@pytest.fixture
def x():
    q, k, p = F.normalize(torch.randn(3, B, T, H, K), dim=-1)
    return {
        "q": q,
        "k": k,
        "p": p,
        "v": torch.randn(B, T, HV, V),
        "g": -torch.rand(B, T, HV),
        "gk": -torch.rand(B, T, HV, K),
        "beta": torch.rand(B, T, HV),
        "b": torch.rand(B, T, HV, K),
        "w": torch.rand(B, T, HV, V),
        "initial_state": torch.randn(B, HV, K, V),
    }


def assert_close(a, b, error=1e-4):
    error = error if CPU else max(error, 5e-3)
    torch.testing.assert_close(a.to(b), b, rtol=error, atol=error)


RULES = {  # name: what it takes, as the definition has it
    "chunk_gated_delta_rule": ("q k v g beta", {}),
    "fused_recurrent_gated_delta_rule": ("q k v g beta", {}),
    "chunk_kda": ("q k v gk beta", {}),
    "fused_recurrent_kda": ("q k v gk beta", {}),
    "chunk_delta_rule": ("q k v beta", {}),
    "fused_recurrent_delta_rule": ("q k v beta", {}),
    "chunk_comba": ("q k v p g beta", {"erase": "undecayed"}),
    "fused_recurrent_comba": ("q k p v g beta", {"erase": "undecayed"}),
    "chunk_gdn2": ("q k v gk b w", {}),
    "fused_recurrent_gdn2": ("q k v gk b w", {}),
    "chunk_simple_gla": ("q k v g", {"erase": None}),
    "fused_recurrent_simple_gla": ("q k v g", {"erase": None}),
}


def wide(tensors):
    return {name: t.double().detach().requires_grad_() for name, t in tensors.items()}


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("name", RULES)
def test_rules(report, x, name, packed):
    names, options = RULES[name]
    tensors = {n: x[n] for n in (*names.split(), "initial_state")}
    bounds = None
    if packed:
        bounds = [0, 33, T * B]
        tensors = {n: t if n == "initial_state" else t.flatten(0, 1)[None] for n, t in tensors.items()}
    truth, given = wide(tensors), {n: t.clone().requires_grad_() for n, t in tensors.items()}
    terms = {n.replace("gk", "g"): t for n, t in truth.items()}
    if "b" in terms:
        terms |= {"p": terms.pop("b") * terms["k"].repeat_interleave(HV // H, 2), "v": terms.pop("w") * terms["v"]}
    expected = recurrent(**terms, **options, cu_seqlens=bounds)
    call = {n.replace("gk", "g"): t for n, t in given.items()}
    call["cu_seqlens"] = None if bounds is None else torch.tensor(bounds)
    found = theirs(name)(**call, output_final_state=True)
    weights = [torch.randn_like(t) for t in expected]
    sum((a * w).sum() for a, w in zip(expected, weights, strict=True)).backward()
    sum((a * w.float()).sum() for a, w in zip(found, weights, strict=True)).backward()
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    for n, t in given.items():
        assert_close(t.grad, truth[n].grad, 1e-3)
    assert report.left == ()


NAIVE = {
    "chunk_gated_delta_rule": ("gated_delta_rule", "naive_recurrent_gated_delta_rule"),
    "chunk_kda": ("kda", "naive_recurrent_kda"),
    "chunk_gdn2": ("gdn2", "naive_recurrent_gdn2"),
    "chunk_simple_gla": ("simple_gla", "naive_recurrent_simple_gla"),
}


@pytest.mark.parametrize("name", NAIVE)
def test_what_fla_defines(report, x, name):
    member, naive = NAIVE[name]
    definition = getattr(importlib.import_module(f"fla.ops.{member}.naive"), naive)
    call = {n.replace("gk", "g"): x[n] for n in (*RULES[name][0].split(), "initial_state")}
    call["v"], call["q"], call["k"] = (
        x["v"],
        x["q"].repeat_interleave(2, 2),
        x["k"].repeat_interleave(2, 2),
    )  # one head for each
    found = theirs(name)(**call, output_final_state=True)
    for a, b in zip(found, definition(**call, output_final_state=True), strict=True):
        assert_close(a, b)


def test_updates_of_a_token(report, x):
    """Gated DeltaProduct is as fla defines it, packed or not, with a decay or without."""
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    if fla.__version__ == "0.5.2":
        pytest.skip("its definition ignores the scale and bounds")
    x = {n: x[n].repeat_interleave(2, 2) if n in "qk" else x[n] for n in ("q", "k", "v", "g", "beta", "initial_state")}
    x |= {n: x[n][:, ::2] for n in "qg"} | {"num_householder": 2, "scale": 0.3}
    row = {n: t.flatten(0, 1)[None] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()}
    for call in (x, x | {"g": None}, row | {"cu_seqlens": torch.tensor([0, 20, B * x["q"].shape[1]])}):
        found = theirs("chunk_gated_delta_product")(**call, output_final_state=True)
        for a, b in zip(found, naive_recurrent_gated_delta_product(**call), strict=True):
            assert_close(a, b)
    assert report.left == ()


def test_gates_in_the_op(report, x):
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    A_log, bias, biases = torch.randn(HV), torch.randn(HV), torch.randn(HV * K)
    raw = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True}
    q, k, v, logits = 3 * x["q"], 3 * x["k"], x["v"], torch.randn(B, T, HV)
    plain = {"beta": 2 * logits.sigmoid(), "use_qk_l2norm_in_kernel": True}
    gdn, kda = theirs("chunk_gated_delta_rule"), theirs("chunk_kda")
    gate = {"use_gate_in_kernel": True, "A_log": A_log}
    g, gk = torch.randn(B, T, HV), torch.randn(B, T, HV, K)
    pairs = [
        (
            gdn(q, k, v, g, logits, **gate, dt_bias=bias, **raw),
            gdn(q, k, v, naive_gdn_gate(g, A_log, bias), **plain),
        ),
        (
            kda(q, k, v, gk, logits, **gate, dt_bias=biases, **raw),
            kda(q, k, v, naive_kda_gate(gk, A_log, biases), **plain),
        ),
        (
            kda(q, k, v, gk, logits, **gate, dt_bias=biases, safe_gate=True, lower_bound=-4.0, **raw),
            kda(q, k, v, naive_kda_lowerbound_gate(gk, A_log, biases, -4.0), **plain),
        ),
    ]
    for (a, _), (b, _) in pairs:
        assert_close(a, b)
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate
    from fla.ops.kda.gate import fused_kda_gate

    assert_close(fused_gdn_gate(g, A_log, bias), naive_gdn_gate(g, A_log, bias))
    assert_close(fused_kda_gate(gk, A_log, biases), naive_kda_gate(gk, A_log, biases))
    assert report.left == ()


LAYERS = {
    "GatedDeltaNet": {"head_dim": 16, "expand_v": 1, "num_v_heads": 4},
    "GatedDeltaNet2": {"head_dim": 16, "expand_v": 1, "num_v_heads": 4},
    "GatedDeltaProduct": {"head_dim": 16, "expand_v": 1, "num_v_heads": 4},
    "KimiDeltaAttention": {"head_dim": 16, "expand_v": 1, "num_v_heads": 4},
    "DeltaNet": {},
    "Comba": {"head_dim": 16},
}


def make(name):
    torch.manual_seed(0)
    layer = getattr(importlib.import_module("fla.layers"), name)(
        hidden_size=32, num_heads=2, layer_idx=0, **LAYERS[name]
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


@contextlib.contextmanager
def may_refuse():
    """fla trains its scalar gates on Hopper with few versions of Triton; no interpreter knows all that kernels do."""
    try:
        yield None
    except Exception as error:
        if "Hopper" in str(error) or type(error).__name__ == "InterpreterError":
            pytest.skip(str(error))
        raise


def assert_like(a, b, rounded):
    """Results of two implementations, of bfloat16 inputs (once or twice as inexact) or in float32."""
    assert a.dtype == b.dtype
    if rounded or not CPU:
        assert (a.float() - b.float()).norm() <= 2e-2 * max(rounded, 1) * b.float().norm() + 1e-3
    else:
        assert_close(a, b, 1e-3)


@pytest.mark.parametrize("kind", ["batch", "padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train(name, kind):
    """A layer trains alike with fla's kernels and with ours."""
    layer, rounded = make(name), {"DeltaNet": 1, "GatedDeltaProduct": 2}.get(name, 0)
    # A token of DeltaProduct is two rows. In this interpreter, fla's gradient of g is 1e23 beyond 128 rows.
    tokens = 60 if name == "GatedDeltaProduct" else T
    x = torch.randn(1 if kind == "packed" else 2, tokens, 32)
    if rounded:  # fla's chunk op does not take float32
        layer, x = layer.bfloat16(), x.bfloat16()
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, :9] = 0
    call = {"packed": {"cu_seqlens": torch.tensor([0, 30, tokens])}, "padded": {"attention_mask": mask}}.get(kind, {})
    results = []
    for take in (may_refuse, register):
        with take() as report:
            layer.zero_grad()
            given = x.clone().requires_grad_()
            y = layer(given, **call)[0]
            y.square().sum().backward()
            results.append((y, given.grad, *(p.grad.clone() for p in layer.parameters())))
    assert report.left == ()
    for a, b in zip(*results, strict=True):
        assert_like(a, b, rounded)


@pytest.mark.parametrize("name", sorted(MIXING))
def test_a_layer_mixes(report, name, monkeypatch):
    """Its source is known, and one op runs between its projections, if nothing needs fla's own forward function."""
    layer, seen, run = make(name), [], layers.mix_layer
    monkeypatch.setattr(layers, "mix_layer", lambda *args: seen.append(args) or run(*args))
    x = torch.randn(1, T, 32, requires_grad=True)

    def mixes(x=x, **options):
        del seen[:]
        layer(x, **options)
        return len(seen) == 1

    assert mixes()
    assert mixes(cu_seqlens=torch.tensor([0, 30, T]))
    assert not mixes(attention_mask=torch.ones(1, T, dtype=torch.long))
    assert not mixes(use_cache=True)
    with torch.no_grad():
        assert mixes()
        assert not mixes(x[:, :64])  # so few tokens are walked one by one
    hook = layer.o_norm.register_forward_hook(lambda *_: None)
    assert not mixes()
    hook.remove()


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Comba"])
def test_layers_decode(report, name):
    from fla.models.utils import Cache

    layer = make(name)
    layer.eval()
    x = torch.randn(2, 80, 32)
    with torch.no_grad():
        whole, cache, parts = layer(x)[0], Cache(), []
        for part in (x[:, :70], *x[:, 70:].split(1, dim=1)):
            y, _, cache = layer(part, past_key_values=cache, use_cache=True)
            parts.append(y)
    assert_close(torch.cat(parts, 1), whole)
    assert report.left == ()


def test_convolution_and_norms(report):
    torch.manual_seed(0)
    conv = fla.modules.ShortConvolution(12, 4, bias=True)
    x = torch.randn(2, 30, 12, requires_grad=True)
    y, state = conv(x, output_final_state=True)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=12).mT)
    assert_close(y, expected)
    assert_close(state, x[:, -4:].mT)
    with torch.no_grad():
        cache = state.clone()
        step, _ = conv(x[:, :1], cache=cache, output_final_state=True)
        row = torch.cat([x[:, -3:], x[:, :1]], 1)
        assert_close(step, F.silu(F.conv1d(row.mT, conv.weight, conv.bias, groups=12).mT))
        assert_close(cache, row.mT)
    gated, plain = fla.modules.FusedRMSNormGated(12, eps=1e-5), fla.modules.RMSNorm(12, eps=1e-5)
    normal = F.rms_norm(x, (12,), eps=1e-5)
    assert_close(gated(x, y), normal * F.silu(y))
    assert_close(plain(x), normal)
    assert report.left == ()
    total, kept = plain(x, residual=y, prenorm=True)
    assert_close(kept, x + y)
    assert_close(total, F.rms_norm(x + y, (12,), eps=1e-5))
    assert report.left == (("rms_norm", "residual, prenorm: expected None and False"),)


LEFT = {
    "cp_context": ("chunk_kda", {"cp_context": object()}, "cp_context: expected a flash_delta.parallel"),
    "chunk_size": ("chunk_kda", {"chunk_size": 16}, "chunk_size: expected 32 or 64, got 16"),
    "unknown": ("chunk_gated_delta_rule", {"head_first": False}, "head_first: no such argument here"),
    "ours alone": ("chunk_gated_delta_rule", {"backend": "torch"}, "backend: no such argument here"),
    "not read": ("chunk_delta_rule", {"use_beta_sigmoid_in_kernel": True}, "use_beta_sigmoid_in_kernel: no such"),
    "per channel": ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(B, T, HV, V)}, "gv: expected None"),
    "reversed": ("fused_recurrent_simple_gla", {"reverse": True}, "reverse: expected False, got True"),
    "wrong": ("chunk_comba", {"beta": torch.zeros(B, T)}, "beta: expected a tensor"),
    "subclass": (
        "chunk_simple_gla",
        {"g": torch.zeros(B, T, HV).as_subclass(type("Sub", (torch.Tensor,), {}))},
        "g: expected a plain tensor, got a Sub",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_fla(report, x, case, caplog, monkeypatch):
    name, change, reason = LEFT[case]
    call = {n.replace("gk", "g"): x[n] for n in RULES[name][0].split()}
    ours = []
    monkeypatch.setattr(Door, "run", lambda door, *_, **__: ours.append(door.name))
    with caplog.at_level(logging.INFO), contextlib.suppress(Exception):  # of fla
        theirs(name)(**(call | change))
    assert name not in ours  # passes of fla's own operation may be
    ((left, why),) = report.left
    assert left == name
    assert reason in why
    assert f"{name} is left to fla: {why}" in caplog.text
    assert f"left to fla: {name}: {why}" in str(report)


def test_the_switch(report, x, monkeypatch):
    monkeypatch.setenv("FLA_FLASH_DELTA", "0")
    monkeypatch.setattr(Door, "run", lambda *_, **__: pytest.fail("ours ran"))
    for name in ("chunk_gated_delta_rule", "chunk_delta_rule"):
        with contextlib.suppress(Exception):  # of fla
            theirs(name)(**{n: x[n] for n in RULES[name][0].split()})
    assert report.left == ()


def test_passes(x):
    """Our backward pass can continue fla's forward pass. The reverse gives NaN, and not gradients of something else."""
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    call = {n: x[n] for n in ("q", "k", "v", "beta", "initial_state")} | {"scale": 0.3}
    rest = {"do": torch.randn(B, T, HV, V), "dht": None}

    def forward():
        g, _, A, *_ = chunk.chunk_gated_delta_rule_fwd(**call, g=x["g"], output_final_state=False)
        return {"g": g, "A": A}

    def backward(kept):
        return chunk.chunk_gated_delta_rule_bwd(**call, **kept, **rest)[:6]

    kept = forward()
    with register() as report:
        gradients = backward(kept)
        for a, b in zip(gradients, backward(forward()), strict=True):
            assert_close(a, b)
        ours = forward()
        assert report.left == ()
    with may_refuse():
        for a, b in zip(gradients, backward(kept), strict=True):
            assert_close(a, b)
        assert all(t.isnan().all() for t in backward(ours)[1:5])  # dk, dv, dbeta, dg


def bound():
    """All functions of fla by the names that its modules have for them."""
    modules = {n: m for n, m in importlib.sys.modules.items() if n.split(".")[0] == "fla"}
    return {(n, name): f for n, m in modules.items() for name, f in vars(m).items() if inspect.isfunction(f)}


def test_it_leaves_fla_as_it_was():
    unregister()
    theirs("chunk_comba")
    before = bound()
    with register() as report:
        assert set(report.registered) == BY_REGISTRY
        classes = {entry.owner: entry.old for entry in report.replaced if entry.name == "forward"}
        assert {cls.__name__ for cls in classes} == MIXING
        assert all(cls.forward is not old for cls, old in classes.items())
        functions = {entry.new.implementation.__name__ for entry in report.replaced if entry.owner not in classes}
        assert functions == {taken.ours.__name__ for taken in TABLE} - BY_REGISTRY
        assert report.refused == ()
        assert str(register()) == str(report)
        changed = {name for name, function in bound().items() if before.get(name) is not function}
        assert ("fla.layers.delta_net", "chunk_delta_rule") in changed
    assert bound() == before
    assert all(cls.forward is old for cls, old in classes.items())
    assert (report.registered, report.replaced) == ((), ())
    with pytest.raises(RuntimeError, match="register"):
        install()


@pytest.mark.parametrize("taken", TABLE, ids=lambda taken: taken.ours.__name__)
def test_arguments_are_those_of_this_fla(taken):
    """Names and defaults, and what it reads of its **kwargs."""
    for path in taken.paths:
        try:
            module = importlib.import_module(f"fla.{path}")
        except ModuleNotFoundError:
            continue
        break
    function = inspect.unwrap(getattr(module, taken.ours.__name__))
    here = inspect.signature(taken.ours).parameters
    for name, p in inspect.signature(function).parameters.items():
        if p.kind is not p.VAR_KEYWORD:
            assert name in here
            assert here[name].default in (p.default, inspect.Parameter.empty, None) or p.default is None
    source = inspect.getsource(function)
    read = set(re.findall(r"kwargs(?:\.get|\.pop)?[\[(] ?['\"](\w+)", source))
    read |= set(re.findall(r"['\"](\w+)['\"] in kwargs", source))
    read |= {"seq_idx"} & read
    assert read - {"head_first", "seq_idx"} <= {*taken.keywords}
    assert {*taken.keywords} <= {*here}


ROW = {"hidden": 24, "of_fla": True, "states": False, "dtype": "float32", "K": 16}
ROWS = [
    Workload("t", "forward", "gdn", 2, 4, 2, 70, packed=True, V=32, **ROW),
    Workload("t", "training", "gdn", 2, 2, 2, 70, packed=False, V=16, **ROW),
    Workload("t", "forward", "kda", 2, 2, 2, 70, packed=False, V=16, **ROW),
    Workload("t", "training", "kda", 2, 2, 2, 70, packed=True, V=32, **ROW),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.member}-{row.kind}")
@pytest.mark.parametrize("name", ["flash_delta", "fla"])
def test_layers_as_the_benchmark_runs_them(row, name):
    entry = Entry(name, torch.device("cpu" if CPU else "cuda"))
    try:
        with contextlib.nullcontext() if name == "flash_delta" else may_refuse():
            _, errors = entry.prepare(row)
    finally:
        unregister()
    names = {f"d{n}" for n in entry.x if n != "cu_seqlens"} if row.kind == "training" else set()
    assert errors.keys() == {"o", *names}
    assert max(error for error, _ in errors.values()) < (1e-5 if CPU else 5e-3)


CALLS = [(rules, name) for name in (
    "gdn", "kda", "kda, bounded", "kda, activated", "gdn, activated", "comba", "gla", "delta",
    "recurrent gdn", "recurrent kda", "recurrent delta",
)]  # fmt: skip
CALLS += [(around, n) for n in ("gdn gate", "kda gate", "bounded gate", "convolution", "norm", "l2norm", "gated norm")]


@pytest.mark.parametrize(("group", "name"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_kernels_of_fla(group, name):
    """A call has the same results by fla and by ours."""
    results = []
    for take in (may_refuse, register):
        torch.manual_seed(0)
        with take() as report:
            call, tensors, differentiable = group()[name]
            results.append(with_gradients(call, **tensors) if differentiable else [t.detach() for t in call(**tensors)])
    assert report.left == ()
    rounded = any(t.dtype == torch.bfloat16 for t in tensors.values())
    for a, b in zip(*results, strict=True):
        assert_like(a, b, rounded)
