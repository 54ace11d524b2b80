"""A backend from outside: the one of docs/adding-a-backend.md, added, asked for, and taken away."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

import flash_delta
from flash_delta import backend
from flash_delta.backend import AroundBackend, Backend
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
    with pytest.raises(ValueError, match="name: expected one that is not taken"):
        backend.register("recurrence", "recurrence")


def test_around_it_has_nothing(added):
    x, w = torch.randn(1, 6, 8), torch.randn(8, 4)
    with pytest.raises(ValueError, match="backend 'recurrence' cannot run this: it has nothing for this"):
        flash_delta.modules.causal_conv1d(x, w, backend="recurrence")


def functions(protocol):
    return {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize("name", backend.names())
def test_backends_have_what_the_protocol_says(name):
    if name != backend.PLAIN:
        pytest.importorskip("triton", reason="Triton is not installed")
    optional = {"workspace_bytes", "empty_saved", "convolve_backward", "normalize_backward"}
    missing = {"step", "decode"} if name == "hopper" else set()  # which its `unsupported` rules out
    for module, protocol in ((backend.load(name), Backend), (backend.load_around(name), AroundBackend)):
        assert functions(protocol) - optional - missing <= set(vars(module))


def test_ops_name_no_backend():
    """Triton the package is named where it is asked for."""
    for path in (ROOT / "flash_delta" / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in backend.names():
                assert (path.name, node.value) == ("_compilation.py", "triton"), f"{path}: {node.value}"
