"""``make hub``: its package imports where there is no flash_delta, and computes what flash_delta does."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hub_calls
import pytest
import torch

import flash_delta
from flash_delta.integrations.transformers import functions
from flash_delta.modules import GatedRMSNorm

ROOT = Path(__file__).parent.parent
FUNCTIONS = {
    "chunk_gated_delta_rule": flash_delta.chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": flash_delta.fused_recurrent_gated_delta_rule,
    "chunk_kda": flash_delta.chunk_kda,
    "fused_recurrent_kda": flash_delta.fused_recurrent_kda,
    "causal_conv1d_fn": functions.causal_conv1d_fn,
    "causal_conv1d_update": functions.causal_conv1d_update,
    "RMSNormGated": GatedRMSNorm,
}
ELSEWHERE = """
import json, sys, torch
from importlib.util import module_from_spec, spec_from_file_location

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flash_delta", "triton", "transformers"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
folder, tests, results = sys.argv[1:]
name = json.load(open(f"{folder}/metadata.json"))["id"]
spec = spec_from_file_location(name, f"{folder}/__init__.py")  # as kernels does
package = sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(package)
sys.path.insert(0, tests)
from hub_calls import calls

names = [name for name in package.__all__ if name not in ("layers", "__version__")]
layers = {name: getattr(package.layers, name).forward for name in names}
torch.save(calls({name: getattr(package, name) for name in names}, layers), results)
assert hasattr(torch.ops, f"{name}_flash_delta") and "flash_delta" not in sys.modules
"""


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("hub_build", ROOT / "hub" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(builder, tmp_path_factory):
    return builder.build(tmp_path_factory.mktemp("hub"))


def test_it_computes_the_same_without_flash_delta(package, tmp_path):
    arguments = [package, ROOT / "tests", tmp_path / "results.pt"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run([sys.executable, "-c", ELSEWHERE, *arguments], check=True, cwd=tmp_path, env=environment)
    found = torch.load(tmp_path / "results.pt")
    expected = hub_calls.calls(FUNCTIONS, {name: forward(name) for name in FUNCTIONS})
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        torch.testing.assert_close(found[name], tensors, rtol=0, atol=0, msg=name)


def forward(name):
    """Returns what models of transformers call for a layer under `enable()`."""
    if name == "RMSNormGated":
        return functions.gated_norm
    rules = {
        "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
        "chunk_kda": "chunk_kimi_delta_attention",
        "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    }
    function = (functions.RULES | functions.CONVOLUTIONS)[rules.get(name, name)]
    return lambda self, *args, **kwargs: function(*args, **kwargs)


def test_all_imports_are_relative_or_of_others(package):
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not any(name.split(".")[0] == "flash_delta" for name in names), path


def test_modules_are_looked_up_under_the_package_s_name(package):
    for path in package.rglob("*.py"):
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [
            s for s in strings if isinstance(s, str) and re.fullmatch(r"flash_delta(\.\w*)+|flash_delta::.*", s)
        ]


def test_the_package_has_the_backends(package):
    copied = {path.relative_to(package).as_posix() for path in package.rglob("*.*")}
    assert {f"flash_delta/kernels/{name}/backend.py" for name in ("triton", "hopper")} <= copied
    assert "flash_delta/kernels/runtime/fastcall/key.c" in copied
    assert not any(path.startswith(("flash_delta/training", "flash_delta/cli")) for path in copied)


def test_the_id_is_of_the_contents(builder, package, tmp_path):
    again, metadata = (json.loads((p / "metadata.json").read_text()) for p in (builder.build(tmp_path), package))
    assert again == metadata
    assert metadata["id"].isidentifier()
    (tmp_path / "build" / "torch-universal" / "old.py").touch()
    assert not (builder.build(tmp_path) / "old.py").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import flash_delta", "from .. import flash_delta"),
        ("import flash_delta.backend as b", "from ..flash_delta import backend as b"),
        ("from flash_delta.backend import load", "from ..flash_delta.backend import load"),
        ("import torch, os", "import torch, os"),
        ('"""from flash_delta.backend import load"""', '"""from flash_delta.backend import load"""'),
    ],
)
def test_relative(builder, line, expected):
    assert builder.relative(line, Path("flash_delta/x.py"), {"flash_delta", "flash_delta.backend"}) == expected


@pytest.mark.parametrize(
    "line", ["import flash_delta.backend", "import os, flash_delta", "from flash_delta.cli import x"]
)
def test_imports_that_cannot_be_relative_are_refused(builder, line):
    with pytest.raises(ValueError, match=r"flash_delta/x.py, line 1: expected .*, got .*flash_delta"):
        builder.relative(line, Path("flash_delta/x.py"), {"flash_delta", "flash_delta.backend"})
