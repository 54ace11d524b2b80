"""fla's modules, which are made from a table: they behave as files would, and the stubs say the same."""

import importlib
import inspect
import operator
import pickle
import pkgutil
import pydoc
import sys
from pathlib import Path

import fla_stubs
import pytest
import torch
from forks import run_each

import flash_delta.integrations.fla
from flash_delta.integrations._fla_mirror import Mirror, homes
from flash_delta.integrations._fla_names import ABOUT, FLA, PATHS, SECOND_PATHS

ROOT = Path(__file__).parent.parent


def at(path):
    return importlib.import_module(f"{FLA}.{path}")


def run(*codes):
    """The outputs of pieces of code, each in a process of its own."""
    found = run_each(*(["-c", code] for code in codes), cwd=ROOT)
    for ended in found:
        assert ended.returncode == 0, ended.stderr
    return [ended.stdout for ended in found]


def test_stubs_are_what_the_table_gives():
    written = {file: file.read_text() for file in fla_stubs.FOLDER.rglob("*.pyi")}
    assert written == fla_stubs.stubs(), "run: python tests/fla_stubs.py"


@pytest.mark.parametrize("path", PATHS)
def test_a_module(path):
    module = at(path)
    assert module.__all__ == [*homes(path)]
    for name, home in homes(path).items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    assert importlib.util.find_spec(module.__name__) is module.__spec__
    assert path.rpartition(".")[0] == "" or path.rpartition(".")[0] in PATHS
    assert (
        getattr(at(path.rpartition(".")[0]) if "." in path else flash_delta.integrations.fla, path.split(".")[-1])
        is module
    )
    with pytest.raises(AttributeError, match=rf"module '{module.__name__}' has no attribute 'chunk_gla'"):
        operator.attrgetter("chunk_gla")(module)


def test_other_rows_are_of_paths():
    assert PATHS.keys() >= {*ABOUT, *SECOND_PATHS, *SECOND_PATHS.values()}


def test_a_walk_finds_every_path():
    found = {
        module.name: module.ispkg for module in pkgutil.walk_packages(flash_delta.integrations.fla.__path__, f"{FLA}.")
    }
    made = {f"{FLA}.{path}": any(other.startswith(f"{path}.") for other in PATHS) for path in PATHS}
    assert found.items() >= made.items()
    files = {path.relative_to(fla_stubs.FOLDER).with_suffix("") for path in fla_stubs.FOLDER.rglob("*.py")}
    others = {name.removeprefix(f"{FLA}.").replace(".", "/") for name in found.keys() - made.keys()}
    assert others == {path.as_posix().removesuffix("/__init__") for path in files} - {"__init__"}


def test_what_is_not_in_the_table():
    with pytest.raises(ModuleNotFoundError, match=rf"No module named '{FLA}.ops.gla'"):
        at("ops.gla")
    with pytest.raises(ImportError, match="cannot import name 'chunk_comba'"):
        exec(f"from {FLA}.ops.kda import chunk_comba")
    with pytest.raises(ImportError, match="expected 'names of ' and a package"):
        Mirror("/tmp")


def test_pickles():
    """Also those that name the path where fla has a class or a function."""
    layer = at("layers").GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=16)
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer)
    assert torch.equal(again.q_proj.weight, layer.q_proj.weight)
    naive = at("ops.kda.naive").naive_chunk_kda
    assert pickle.loads(pickle.dumps(naive)) is naive
    assert pickle.loads(f"c{FLA}.ops.kda.naive\nnaive_chunk_kda\n.".encode()) is naive
    assert pickle.loads(f"c{FLA}.layers.gated_deltanet\nGatedDeltaNet\n.".encode()) is type(layer)


def test_what_people_read():
    assert inspect.getsource(at("ops.kda.naive").naive_chunk_kda).startswith("def naive_chunk_kda(\n")
    assert inspect.getsource(at("ops.kda").chunk_kda).startswith("def chunk_kda(\n")
    text = pydoc.plain(pydoc.render_doc(at("ops")))
    assert "fla.ops: the members of the gated delta rule's family." in text
    assert "simple_gla (package)" in text
    assert "fused_recurrent_comba(" in text
    assert "register" in pydoc.plain(pydoc.render_doc(flash_delta.integrations.fla))
    assert at("modules.l2norm").__doc__ == "fla.modules.l2norm, another path of fla.modules.norm.l2norm."


def test_a_module_again():
    before = at("ops.kda.chunk")
    assert importlib.reload(before) is before
    importlib.invalidate_caches()
    del sys.modules[before.__name__]
    try:
        assert at("ops.kda.chunk").chunk_kda is before.chunk_kda
    finally:
        sys.modules[before.__name__] = at("ops.kda").chunk = before


def test_attributes_lead_to_modules_and_names_need_nothing_of_an_installed_fla():
    _, _, names = run(
        f"import {FLA} as fla\nfla.ops.kda.chunk.chunk_kda, fla.modules.norm.l2norm.l2norm, fla.layers.utils.pad_input",
        f"from {FLA}.ops import *\nfrom {FLA} import *\nchunk_kda, GatedDeltaNet, install, unregister",
        f"import sys, {FLA}.ops, {FLA}.layers, {FLA}.modules\nprint(*(n for n in sys.modules if '{FLA}' in n))",
    )
    found = names.split()
    assert f"{FLA}.calls" in found
    assert not [name for name in found if name.startswith((f"{FLA}.takeover", f"{FLA}.stand_in"))]


THREADS = f"""
import importlib, threading
from concurrent.futures import ThreadPoolExecutor
import torch, flash_delta

PATHS = {sorted(PATHS)} + ["stand_in", "takeover.register"]
start = threading.Barrier(len(PATHS))

def enter(path):
    start.wait()
    return importlib.import_module("{FLA}." + path)

with ThreadPoolExecutor(len(PATHS)) as pool:
    for path, module in zip(PATHS, pool.map(enter, PATHS)):
        assert all(hasattr(module, name) for name in getattr(module, "__all__", ())), path
"""


def test_threads_import_at_once():
    run(*[THREADS] * 3)
