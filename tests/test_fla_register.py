"""`register` on a package that has the shape of fla's registry; tests/engines/test_fla.py has fla itself."""

import importlib
import inspect
import logging
import sys
import textwrap

import pytest
import torch

import flash_delta
from flash_delta.integrations.fla import ops, register, unregister
from flash_delta.integrations.fla.takeover.door import Door
from flash_delta.integrations.fla.takeover.table import TABLE, _left_to_torch

BACKENDS = """
import os
from functools import wraps
from inspect import unwrap

_DISPATCH_DISABLED = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"

class BaseBackend:
    def is_enabled(self):
        return os.environ.get(self.env_var, "1") != "0"

class BackendRegistry:
    _registries = {}
    def __init__(self):
        self._backends = {}
    def register(self, backend):
        self._backends[backend.backend_type] = backend
    @classmethod
    def ensure_initialized(cls, operation):
        cls._registries.setdefault(operation, cls())

def asking(registry, function):
    @wraps(function)
    def call(*args, **kwargs):
        for backend in registry()._backends.values():
            if backend.is_enabled() and getattr(backend, function.__name__ + "_verifier")(*args, **kwargs)[0]:
                return getattr(backend, function.__name__)(*args, **kwargs)
        return function(*args, **kwargs)
    return call
"""
OLD = """
def dispatch(operation):
    def found():
        BackendRegistry.ensure_initialized(operation)
        return BackendRegistry._registries[operation]
    return lambda function: asking(found, function)
"""
NEW = """
_operation_registries, _function_registries = {}, {}

def dispatch(what):
    table = _operation_registries if isinstance(what, str) else _function_registries
    registry = table.setdefault(unwrap(what) if callable(what) else what, BackendRegistry())
    return asking(lambda: registry, what) if callable(what) else lambda function: asking(lambda: registry, function)
"""
RULE = "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False"


def lay_out(folder, version):
    """The files of a package that answers 'fla' to every call."""
    new = version != "0.5.2"
    backends = "fla.backends" if new else "fla.ops.backends"
    by_operation = "@dispatch('kda')" if not new else "@dispatch"
    files = {
        "__init__": f"__version__ = '{version}'",
        "backends" if new else "ops/backends": BACKENDS + (NEW if new else OLD),
        "modules/__init__": "",
        "ops/__init__": "",
        "ops/gated_delta_rule/__init__": "",
        "ops/gated_delta_rule/chunk": f"""
            from {backends} import dispatch

            @dispatch('gated_delta_rule')
            def chunk_gated_delta_rule({RULE}, **kwargs):
                return 'fla'
        """,
        "ops/kda/__init__": "",
        "ops/kda/chunk": f"""
            from {backends} import dispatch

            {by_operation}
            def chunk_kda({RULE}, **kwargs):
                return 'fla'
        """,
        "ops/comba/__init__": "from fla.ops.comba.chunk import chunk_comba",
        "ops/comba/chunk": "def chunk_comba(q, k, v, p, g, beta=None, scale=None):\n    return 'fla'",
    }
    for name, text in files.items():
        path = folder / "fla" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture(params=["0.5.2", "0.6.0"])
def fla(request, tmp_path, monkeypatch):
    if "fla" in sys.modules:
        pytest.skip("fla has been imported")
    lay_out(tmp_path, request.param)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    unregister()
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]


@pytest.fixture
def x():
    torch.manual_seed(0)
    q, k, p = torch.randn(3, 1, 9, 2, 8)
    v, g, beta = torch.randn(1, 9, 2, 8), -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
    return {"q": q, "k": k, "v": v, "p": p, "g": g, "beta": beta}


def gdn(x, **change):
    return {name: x[name] for name in ("q", "k", "v", "g", "beta")} | change


def test_both_ways(fla, x):
    chunk, comba = fla("fla.ops.gated_delta_rule.chunk"), fla("fla.ops.comba")
    kda, inside = fla("fla.ops.kda.chunk"), fla("fla.ops.comba.chunk")
    before = chunk.chunk_gated_delta_rule, comba.chunk_comba
    with register() as report:
        assert report.registered == ("chunk_gated_delta_rule", "chunk_kda")
        assert {(e.module, e.name) for e in report.replaced} == {
            ("fla.ops.comba", "chunk_comba"),
            ("fla.ops.comba.chunk", "chunk_comba"),
        }
        assert str(report.replaced[0]) == "chunk_comba: chunk_comba of fla -> chunk_comba of flash_delta"
        assert len(report.refused) == len(TABLE) - 3
        assert str(report).startswith(f"flash_delta in fla {fla('fla').__version__}: 3 functions\n")
        o, state = chunk.chunk_gated_delta_rule(*gdn(x).values(), None, None, None)
        assert state is None
        assert torch.equal(o, flash_delta.chunk_gated_delta_rule(**gdn(x))[0])
        gk = x["g"][..., None].expand(x["k"].shape)
        assert torch.equal(kda.chunk_kda(**gdn(x, g=gk))[0], flash_delta.chunk_kda(**gdn(x, g=gk))[0])
        for module in (comba, inside):
            assert torch.equal(module.chunk_comba(**x)[0], flash_delta.chunk_comba(**x)[0])
        assert report.left == ()
    assert (chunk.chunk_gated_delta_rule, comba.chunk_comba) == before
    assert chunk.chunk_gated_delta_rule(**gdn(x)) == inside.chunk_comba(**x) == "fla"
    assert (report.registered, report.replaced, report.refused) == ((), (), ())


def test_a_name_that_was_imported_while_it_lasted(fla, x):
    report = register()
    module = type(sys)("fla_of_tests")
    sys.modules["fla_of_tests"] = module
    exec("from fla.ops.comba import chunk_comba", vars(module))
    assert module.chunk_comba(**x) != "fla"
    with register():
        pass
    assert len(report.replaced) == 2  # that block was not the first to register
    unregister()
    del sys.modules["fla_of_tests"]
    assert module.chunk_comba(**x) == "fla"


def test_what_is_left(fla, x, caplog):
    chunk, comba = fla("fla.ops.gated_delta_rule.chunk"), fla("fla.ops.comba")
    report = register()
    cases = [
        (chunk.chunk_gated_delta_rule, gdn(x, head_first=True), "head_first: no such argument here"),
        (chunk.chunk_gated_delta_rule, gdn(x, backend="torch"), "backend: no such argument here"),
        (chunk.chunk_gated_delta_rule, gdn(x, k=x["k"].half()), "k: expected torch.float32 like q, got torch.float16"),
        (comba.chunk_comba, x | {"scale": torch.ones(2)}, "scale: expected a number or None"),
        (comba.chunk_comba, x | {"g": [1.0]}, "g: expected a tensor"),
    ]
    with caplog.at_level(logging.INFO):
        for function, call, reason in cases:
            for _ in range(2):
                assert function(**call) == "fla"
            assert any(reason in why for _, why in report.left), report.left
            assert reason in caplog.text
    assert len(report.left) == len(cases)  # each once
    assert f"left to fla: chunk_comba: {report.left[-1][1]}" in str(report)


def test_switches(fla, x, monkeypatch):
    chunk, comba = fla("fla.ops.gated_delta_rule.chunk"), fla("fla.ops.comba")
    with register():
        monkeypatch.setenv("FLA_FLASH_DELTA", "0")
        assert chunk.chunk_gated_delta_rule(**gdn(x)) == comba.chunk_comba(**x) == "fla"
        monkeypatch.setenv("FLA_FLASH_DELTA", "1")
        assert comba.chunk_comba(**x) != "fla"
    backends = fla("fla.ops.backends" if fla("fla").__version__ == "0.5.2" else "fla.backends")
    monkeypatch.setattr(backends, "_DISPATCH_DISABLED", True)
    with register() as report:
        assert [str(entry) for entry in report.refused] == ["fla: every function: FLA_DISABLE_BACKEND_DISPATCH=1"]
        assert comba.chunk_comba(**x) == "fla"


def test_other_versions(fla, monkeypatch):
    monkeypatch.setattr(fla("fla"), "__version__", "0.4.1")
    with pytest.raises(ImportError, match=r"fla: expected version >= 0.5.2, got 0.4.1"):
        register()


def test_without_fla():
    if "fla" in sys.modules or importlib.util.find_spec("fla"):
        pytest.skip("fla is installed")
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        register()
    unregister()


def answers(taken, theirs, *args, **kwargs):
    return Door(taken, theirs).refusal(args, kwargs)


def test_calls_are_asked_about_once(x, monkeypatch):
    (taken,) = [taken for taken in TABLE if taken.ours is ops.chunk_gated_delta_rule]
    asked = []
    taken = taken._replace(refusal=lambda **arguments: asked.append(arguments))
    door = Door(taken, flash_delta.chunk_gated_delta_rule)
    for _ in range(3):
        assert door.refusal((), gdn(x)) is None
    bounds = torch.tensor([0, 4, 9])
    assert door.refusal((), gdn(x, cu_seqlens=bounds)) is None
    assert door.refusal((), gdn(x, cu_seqlens=bounds.clone())) is None
    assert len(asked) == 2
    assert door.refusal((), gdn(x, cu_seqlens=torch.tensor([0, 5, 9]))) is None  # values on the host may decide
    with torch.no_grad():
        assert door.refusal((), gdn(x)) is None
    assert door.refusal((), gdn(x, q=x["q"].requires_grad_())) is None
    assert len(asked) == 5
    assert door.refusal((x["q"],), gdn(x)) == "the arguments are not those of the function"
    assert door.refusal((None,) * 99, {}) == "the arguments are not those of the function"
    assert door.run(**gdn(x, output_final_state=None))[1] is None


@pytest.mark.parametrize("taken", TABLE, ids=lambda taken: taken.ours.__name__)
def test_a_wrong_call_is_left(taken):
    assert answers(taken, taken.ours, torch.randn(2, 3), torch.randn(2, 3)) is not None


def test_rules_that_are_left(x):
    by_name = {taken.ours.__name__: taken for taken in TABLE}
    kda, call = by_name["chunk_kda"], gdn(x, g=x["g"][..., None].expand(x["k"].shape))
    assert answers(kda, kda.ours, **call, chunk_size=32) is None
    assert answers(kda, kda.ours, **call, chunk_size=16) == "chunk_size: expected 32 or 64, got 16"
    gla, call = by_name["fused_recurrent_simple_gla"], {name: x[name] for name in ("q", "k", "v", "g")}
    assert answers(gla, gla.ours, **call) is answers(gla, gla.ours, **call, reverse=False) is None
    assert answers(gla, gla.ours, **call, reverse=True) == "reverse: expected False, got True"
    comba, call = by_name["fused_recurrent_comba"], x | {"beta": x["v"]}
    assert answers(comba, comba.ours, **x) is None
    assert "beta: expected a tensor [1, 9, 2]" in answers(comba, comba.ours, **call)
    call = gdn(x, g=x["g"][..., None].expand(x["k"].shape))
    assert "A_log: expected None" in answers(kda, kda.ours, **call, A_log=x["v"])
    for taken, promise in ((kda, {"safe_gate": True}), (by_name["fused_recurrent_kda"], {"use_gate_in_kernel": True})):
        assert "fla does not read it here" in answers(taken, taken.ours, **call, lower_bound=-5.0)
        assert answers(taken, taken.ours, **call, lower_bound=-5.0, **promise) is None
    for name, more in (("fwd", {"output_final_state": False}), ("bwd", {"A": x["v"], "do": x["v"], "dht": None})):
        taken, call = by_name[f"chunk_gated_delta_rule_{name}"], gdn(x, scale=None, initial_state=None, **more)
        assert answers(taken, taken.ours, **call) is None
        assert answers(taken, taken.ours, **call, cp_context=object()) == "cp_context: expected None"
        assert "chunk_size: expected" in answers(taken, taken.ours, **call, chunk_size=7)


def test_pytorch_on_a_gpu_is_no_gain():
    assert _left_to_torch("triton", torch.device("cuda")) is None
    assert _left_to_torch("torch", torch.device("cpu")) is None
    why = _left_to_torch("torch", torch.device("cuda"), {"torch": "chosen", "triton": "cannot: too wide"})
    assert why == "only PyTorch's operations could run it: triton cannot: too wide"


def names(taken):
    return {
        "x": torch.randn(2, 6, 5),
        "g": torch.randn(2, 6, 5),
        "weight": torch.randn(5, 4) if "conv" in taken.ours.__name__ else torch.randn(5),
        "bias": None,
    }


AROUND = {
    "causal_conv1d": [
        ({"backend": "cuda"}, "backend: the call asks for 'cuda'"),
        ({"cp_context": object()}, "cp_context: expected None"),
        ({"weight": None}, "weight: expected a tensor"),
        ({"residual": torch.randn(2, 6, 5).half()}, "residual: expected torch.float32"),
        ({"activation": "gelu"}, "activation: expected 'silu' or None"),
        ({"activation": "swish", "residual": torch.randn(2, 6, 5)}, None),
    ],
    "rms_norm": [({}, None), ({"weight": None}, None), ({"bias": torch.ones(5)}, "bias: expected None")],
    "l2norm": [({}, None), ({"output_dtype": torch.float64}, None), ({"eps": -1.0}, "eps: expected")],
    "rms_norm_gated": [
        ({}, None),
        ({"activation": "gelu"}, "activation: expected one of silu, swish, sigmoid"),
        ({"residual": torch.randn(2, 6, 5)}, "residual, prenorm: expected None and False"),
        ({"prenorm": True}, "residual, prenorm: expected None and False"),
    ],
}


@pytest.mark.parametrize("name", AROUND)
def test_around_the_rule(name):
    (taken,) = [taken for taken in TABLE if taken.ours.__name__ == name]
    for change, reason in AROUND[name]:
        known = inspect.signature(taken.ours).parameters
        call = {n: value for n, value in (names(taken) | change).items() if n in known}
        why = answers(taken, taken.ours, **call)
        assert why is None if reason is None else reason in why
        if why is None:
            taken.ours(**call)
