"""The key of a compilation changes with everything that the compiled code depends on, and with nothing else."""

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SOURCE = '''
from typing import Any, NamedTuple

import triton
import triton.language as tl

UNIT, OTHER = 8, 9
MOST = tl.constexpr(16)


class Pair(NamedTuple):
    first: Any
    second: Any


@triton.constexpr_function
def pitch(width):
    return UNIT * width


@triton.jit
def one_more(x, more: tl.constexpr = OTHER):
    return x + more + MOST


@triton.jit
def kernel(x, n, N: tl.constexpr):
    """Stores a number."""
    pair = Pair(n, 3)
    tl.store(x + pair[0], one_more(pair[1]) + pitch(N))
'''
USUAL = {"n": 32, "N": 4, "num_warps": 4, "target": "sm_90a"}


def key(place, source=SOURCE, settings=(), **changed):
    """The key of one launch of ``source``'s kernel."""
    import torch

    from flash_delta.compiler.offline import offline

    path = place / "kernels.py"
    path.write_text(source)
    spec = spec_from_file_location("kernels", path)
    module = sys.modules["kernels"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    launch = USUAL | {"dtype": torch.float32} | changed
    x = torch.empty(64, dtype=launch.pop("dtype"), device="meta")
    os.environ.update(settings)
    with offline(launch.pop("target"), compiles=False) as found:
        module.kernel[1,](x, launch.pop("n"), **launch)
    for name, _ in settings:
        del os.environ[name]
    return found[0].key


def keys(place, *launches):
    import linecache

    found = []
    for number, launch in enumerate(launches):
        (place / str(number)).mkdir()
        found.append(key(place / str(number), **launch))
        linecache.clearcache()
    return found


CHANGES = {
    "kernel": ("pair[0]", "pair[0] + 1"),
    "callee": ("x + more", "x - more"),
    "constant": ("tl.constexpr(16)", "tl.constexpr(17)"),
    "number": ("UNIT, OTHER = 8", "UNIT, OTHER = 16"),
    "default": ("8, 9", "8, 10"),
    "fields": ("    first: Any\n    second: Any", "    second: Any\n    first: Any"),
}


def test_it_changes_with_the_source(process, tmp_path):
    changed = [{"source": SOURCE.replace(*change)} for change in CHANGES.values()]
    assert all(launch["source"] != SOURCE for launch in changed)
    usual, *others = process.submit(keys, tmp_path, {}, *changed).result()
    assert len({usual, *others}) == 1 + len(CHANGES), dict(zip(CHANGES, others, strict=True))


def test_it_changes_with_the_launch(process, tmp_path):
    import torch

    launches = [
        {"n": 33}, {"n": 1}, {"N": 5}, {"num_warps": 8}, {"dtype": torch.bfloat16}, {"target": "sm_100"},
        {"target": "gfx942"}, {"target": "gfx950"}, {"settings": (("DISABLE_PTXAS_OPT", "1"),)},
    ]  # fmt: skip
    assert len(set(process.submit(keys, tmp_path, {}, *launches).result())) == 1 + len(launches)


def test_it_does_not_change_with_what_changes_no_code(process, tmp_path):
    """Where the function lies in its file, what else is there, and a number of the same kind."""
    moved = SOURCE.replace("import triton\n", "import triton\n\nUNUSED = 1\n# A comment.\n", 1)
    same = [{}, {"source": moved}, {"n": 48}, {"settings": (("TRITON_DISABLE_LINE_INFO", "1"),)}]
    assert len(set(process.submit(keys, tmp_path, *same).result())) == 1
