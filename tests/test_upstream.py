"""Patches for other repositories (`upstream/`): what they bring, and that they apply to the versions they are for."""

import ast
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
UPSTREAM = ROOT / "upstream"
README = (UPSTREAM / "README.md").read_text()


class Target(NamedTuple):
    version: str
    package: str  # where the repository has it
    title: str  # of its section
    header: str  # of new files


TARGETS = {
    "transformers": Target("5.24.0", "src/transformers", "transformers", "# Copyright"),
    "sglang": Target("0.5.23", "python/sglang", "SGLang", ""),
    "vllm": Target("0.33.0", "vllm", "vLLM", "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText"),
}
each = pytest.mark.parametrize("name", TARGETS)


def patch_of(name):
    (path,) = (UPSTREAM / name).iterdir()
    return path


def installed_package(name):
    """The folder of a package, if it is the version that the patch is for."""
    try:
        found = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if found != TARGETS[name].version:
        pytest.skip(f"{name} is {found}, and the patch is for {TARGETS[name].version}")
    return Path(find_spec(name).origin).parent


def old_files(name):
    """The files that a patch changes."""
    return re.findall(r"^--- a/(\S+)$", patch_of(name).read_text(), re.MULTILINE)


def new_files(text):
    """The files that a patch creates: their contents by their paths."""
    pieces = re.split(r"^diff --git a/\S+ b/(\S+)\n", text, flags=re.MULTILINE)[1:]
    bodies = {path: body for path, body in zip(pieces[::2], pieces[1::2], strict=True) if body.startswith("new file")}
    return {
        path: "".join(f"{line[1:]}\n" for line in body.split("\n@@ ", 1)[1].splitlines()[1:] if line[0] == "+")
        for path, body in bodies.items()
    }


def apply(patch, *options, folder):
    """Runs `git apply` in a folder outside of any repository; returns what it prints."""
    command = ["git", "--git-dir=none", "apply", *options, patch]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_folder_is_of_a_known_repository():
    assert {path.name for path in UPSTREAM.iterdir()} == {*TARGETS, "README.md"}


@each
def test_it_parses(name, tmp_path):
    """git counts the lines of every hunk. The message of the commit stands above."""
    counts = apply(patch_of(name), "--numstat", folder=tmp_path).splitlines()
    paths = {line.split("\t")[2] for line in counts}
    text = patch_of(name).read_text()
    assert re.match(r"Subject: \[PATCH\] .{10,72}\n\n", text)
    assert any(path.startswith(TARGETS[name].package) for path in paths)
    assert set(new_files(text)) <= paths


@each
def test_new_files_are_code_with_the_repository_s_header_and_one_is_its_tests(name):
    files = new_files(patch_of(name).read_text())
    for path, source in files.items():
        ast.parse(source, path)
        assert source.startswith(TARGETS[name].header), path
    (tests,) = (path for path in files if Path(path).name.startswith("test_"))
    assert len(re.findall(r"\bdef test_", files[tests])) > 3
    assert f"`{tests}`" in README


@each
def test_readme_names_the_version_and_the_precondition(name):
    target = TARGETS[name]
    (row,) = re.findall(rf"^\| `{name}/` .*$", README, re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == f"{target.version}, tag `v{target.version}`"
    assert "hub" in cells[4] or "PyPI" in cells[4]
    section = README.split(f"\n## {target.title}\n")[1].split("\n## ")[0]
    assert "**Precondition.**" in section


@each
def test_it_applies(name, tmp_path):
    installed = installed_package(name)
    for path in old_files(name):
        copy = tmp_path / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((installed / Path(path).relative_to(TARGETS[name].package)).read_bytes())
    apply(patch_of(name), "--check", folder=tmp_path)


def test_rows_for_transformers_are_of_the_package():
    """Every layer of the package of `make hub` has a row, with the version that the package has."""
    text = patch_of("transformers").read_text()
    rows = re.findall(r'\+ +repo_id="(.*)",\n\+ +layer_name="(\w+)",\n\+ +version=(\d+),', text)
    layers = ast.parse((ROOT / "hub/package/layers.py").read_text()).body
    (published,) = re.findall(r'"version": (\d+),', (ROOT / "hub/build.py").read_text())
    expected = sorted(node.name for node in layers if isinstance(node, ast.ClassDef))
    assert sorted(layer for _, layer, _ in rows) == expected
    assert {(repository, found) for repository, _, found in rows} == {("kernels-community/flash-delta", published)}
    assert "`kernels-community/flash-delta`" in README
