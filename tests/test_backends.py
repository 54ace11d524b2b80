"""A backend from outside: the one of docs/adding-a-backend.md, added, asked for, and taken away."""

import ast
import inspect
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_delta
from flash_delta import backend
from flash_delta.backend import Backend, ElementwiseBackend
from flash_delta.modules import causal_conv1d, rms_norm
from flash_delta.ops import _known_calls
from flash_delta.testing import CASES, MEMBERS, make_inputs
from flash_delta.testing.accuracy import run

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-backend.md").read_text(), re.S)
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def added(tmp_path, monkeypatch, capsys):
    """The page, as somebody follows it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    module, use = BLOCKS
    (tmp_path / "recurrence.py").write_text(module)
    exec(compile(use, "adding-a-backend.md", "exec"), {})
    yield capsys.readouterr().out
    backend.unregister("recurrence")
    del sys.modules["recurrence"]
    with pytest.raises(ValueError, match="backend: expected one of triton, hopper, torch, got 'recurrence'"):
        backend.load("recurrence")


@pytest.mark.parametrize("name", ["gdn", "kda", "comba", "simple-gla", "delta-rule", "gdn-recurrent"])
def test_it_computes_what_others_do(added, name):
    member = MEMBERS[name]
    x = make_inputs(BY_NAME["ragged"], member, torch.float64)
    x = {n: t for n, t in x.items() if not isinstance(t, bool) or not t or n == "output_final_state"}
    want, got = run(member, x, "torch"), run(member, x, "recurrence")
    assert want.keys() == got.keys()
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=1e-9, atol=1e-9)


def test_what_is_said_of_it(added):
    assert "would run on backend 'torch'" in added
    assert "recurrence: can, but 'torch' is preferred: it is slow" in added
    q, bounds = torch.randn(1, 6, 2, 8), torch.tensor([0, 2, 6])
    found = flash_delta.explain(flash_delta.chunk_delta_rule, q, q, q, torch.rand(1, 6, 2), backend="recurrence")
    assert found.reasons["recurrence"] == "chosen, as asked for; one token after the other"
    with pytest.raises(ValueError, match="backend 'recurrence' cannot run this: it runs dense rows, and no pools"):
        flash_delta.chunk_delta_rule(q, q, q, torch.rand(1, 6, 2), cu_seqlens=bounds, backend="recurrence")
    with pytest.raises(ValueError, match="name: expected a name that is not taken"):
        backend.register("recurrence", "recurrence")


def test_a_compiler_takes_it_too(added):
    """It saves nothing and has no ``empty_saved``: backward starts from the inputs."""
    q, g = torch.randn(1, 7, 2, 4, dtype=torch.float64, requires_grad=True), -torch.rand(1, 7, 2, dtype=torch.float64)
    op = torch.compile(partial(flash_delta.chunk_simple_gla, backend="recurrence"), backend="aot_eager", fullgraph=True)
    outputs = op(q, q, q, g)[0], flash_delta.chunk_simple_gla(q, q, q, g, backend="torch")[0]
    got, want = (torch.autograd.grad(o.sin().sum(), q)[0] for o in outputs)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


AROUND = {
    "convolution": lambda x, w, **y: causal_conv1d(x, w, activation="silu", **y)[0],
    "norm": lambda x, w, **y: rms_norm(x, w[:, 0], 1e-5, **y),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", AROUND)
def test_around_it_stands_on_torch(added, name, compiled):
    """Whose operations autograd and compilers see through, whatever name they are asked by."""
    x, w = torch.randn(1, 6, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    run_here = partial(AROUND[name], backend="recurrence")
    f = torch.compile(run_here, backend="eager", fullgraph=True) if compiled else run_here
    got, want = (torch.autograd.grad(y.sin().sum(), (x, w)) for y in (f(x, w), AROUND[name](x, w, backend="torch")))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.fixture
def picky(monkeypatch):
    """It wants every call, and can run none; around the rule it has nothing to be asked of."""
    module = SimpleNamespace(unsupported=lambda problem: "never", preference=lambda problem: (9, None))
    monkeypatch.setitem(sys.modules, "picky", module)
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    backend.register("picky", "picky", "picky", takes_cpu=lambda: True)
    backend.register("bare", "picky", takes_cpu=lambda: True)
    yield
    backend.unregister("picky")
    backend.unregister("bare")


def test_a_backend_without_modules_refuses_them(picky):
    x, w = torch.randn(1, 6, 8), torch.randn(8, 4)
    with pytest.raises(ValueError, match="backend 'bare' cannot run this: it has nothing for this"):
        AROUND["convolution"](x, w, backend="bare")
    assert AROUND["convolution"](x, w).shape == x.shape


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_an_operator_goes_on_to_the_next(picky):
    """When the preferred backend refuses, an operator goes on to the next one, as an eager call does."""
    x, w = torch.randn(3, 8), torch.randn(8)
    (y,) = torch.ops.flash_delta.rms_norm(x, w, None, "rms_norm", None, 1e-5, None, None)
    torch.testing.assert_close(y, rms_norm(x, w, 1e-5, backend="torch"))


def functions(protocol):
    return {name: f for name, f in vars(protocol).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", backend.names())
def test_backends_have_what_the_protocol_says(name):
    """Every function, with its parameters in their order; the last of those that run a call is ``known``."""
    if name != "torch":
        pytest.importorskip("triton", reason="Triton is not installed")
    around = backend.load_elementwise(name)
    optional = {"workspace_bytes", "plans", "empty_saved"}
    optional |= {"step", "decode", "commit"} if name == "hopper" else set()  # which its `unsupported` rules out
    optional |= {"convolve_backward", "normalize_backward", "gate_backward"} if backend.is_seen_through(name) else set()
    for module, protocol in ((backend.load(name), Backend), (around, ElementwiseBackend)):
        for function, described in functions(protocol).items():
            if function in optional and not hasattr(module, function):
                continue
            wanted = list(inspect.signature(described).parameters.values())[1:]  # without self
            found = list(inspect.signature(getattr(module, function)).parameters.values())
            assert [p.default for p in found] == [p.default for p in wanted], f"{module.__name__}.{function}"
            assert ("known" in (p.name for p in found[-1:])) == (wanted[-1].name == "known"), function


def test_every_function_of_the_protocol_is_described():
    for protocol in (Backend, ElementwiseBackend):
        for name, f in functions(protocol).items():
            assert inspect.getdoc(f), name
            assert "return" in f.__annotations__, name
            parameters = f.__code__.co_varnames[1 : f.__code__.co_argcount]
            assert set(parameters) <= set(f.__annotations__), name


def words(path):
    """All that code says: names, imports and text, and no docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings are expressions
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value
        named = (getattr(node, field, None) for field in ("id", "attr", "name", "module", "asname", "arg"))
        yield from (name for name in named if isinstance(name, str))


@pytest.mark.parametrize("room", ["ops", "reference", "modules", "layers", "models"])
def test_only_the_registry_names_kernels(room):
    """The package Triton is named where it is asked for."""
    for path in (ROOT / "flash_delta" / room).rglob("*.py"):
        said = {word for word in words(path) if re.search("hopper|triton", word, re.IGNORECASE)}
        assert said <= ({"require_triton"} if path.name == "_compilation.py" else set()), f"{path}: {said}"


def test_ops_choose_no_backend_by_its_name():
    for path in (ROOT / "flash_delta" / "ops").rglob("*.py"):
        assert not {"torch"} & {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
