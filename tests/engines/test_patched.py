"""The tests that the patches of `upstream/` bring, run on a patched copy of each repository's package. `make upstream`
runs them, once for each repository. Without the patch's change each of them fails, since it imports what is new or asks
for what has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_upstream import ROOT, TARGETS, apply, each, installed_package, new_files, old_files, patch_of


def patched_copy(name, folder):
    """Links to all files of a package, and patched copies of those that the patch changes."""
    package = folder / TARGETS[name].package
    shutil.copytree(
        installed_package(name), package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in old_files(name):
        link = folder / path
        source = link.resolve()
        link.unlink()
        shutil.copyfile(source, link)
    apply(patch_of(name), folder=folder)
    return package.parent


@each
def test_its_own_tests_pass(name, tmp_path):
    for needed in ("kernels", "parameterized") if name == "transformers" else ():
        pytest.importorskip(needed, reason=f"transformers' tests need {needed}")
    parent = patched_copy(name, tmp_path)
    subprocess.run([sys.executable, ROOT / "hub" / "build.py", tmp_path / "hub"], check=True)
    (tests,) = (path for path in new_files(patch_of(name).read_text()) if Path(path).name.startswith("test_"))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [parent, ROOT / "tests" / "engines", *map(os.path.abspath, given)]  # the tests run in another folder
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "PATCHED": name, "OMP_NUM_THREADS": "1", "RUN_SLOW": "1",
        "LOCAL_KERNELS": f"kernels-community/flash-delta={tmp_path / 'hub'}", "VLLM_PLUGINS": "",
        "TRITON_INTERPRET": "1",
    }  # fmt: skip
    options = ["-q", "-p", "patched_machine", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", *options, tmp_path / tests]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    print(ran.stdout[-2000:])
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]
