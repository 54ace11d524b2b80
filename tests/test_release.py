"""A release is refused if a file of it is not what the checkout says."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from flash_delta import __version__
from flash_delta.kernels import TRITON
from workshop.release import installed

pytest.importorskip("triton")

from flash_delta.kernels.runtime import pack
from workshop.release.files import BESIDE, KERNELS, SDIST, WHEEL, only_file, require_files

ROOT = Path(__file__).parent.parent
PACKAGE = {"flash_delta/__init__.py": "", "flash_delta/py.typed": ""}


class Release:
    """A small checkout and the files of its release."""

    def __init__(self, root):
        self.root, self.folder = root / "checkout", root / "release"
        self.sdist = PACKAGE | dict.fromkeys(BESIDE, "")
        self.wheel, self.version = dict(PACKAGE), __version__
        self.identity = pack.identity()
        self.kernels = {f"sm_90-triton-{a}.{b}.0-all.zip": self.identity for a, b in TRITON}
        for name in PACKAGE:
            self.file(name)
        self.git("init", "-q")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "all")

    def file(self, name):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text("")

    def git(self, *arguments):
        subprocess.run(["git", *arguments], cwd=self.root, check=True)

    def write(self):
        self.folder.mkdir()
        with tarfile.open(self.folder / SDIST.replace("*", __version__), "w:gz") as file:
            for name in self.sdist:
                file.addfile(tarfile.TarInfo(f"flash_delta-{__version__}/{name}"))
        packs = {f"flash_delta_kernels/{name}": packed(identity) for name, identity in self.kernels.items()}
        self.zip(WHEEL, self.wheel)
        self.zip(KERNELS, {"flash_delta_kernels/known.abi3.so": ""} | packs)

    def zip(self, pattern, contents):
        with zipfile.ZipFile(self.folder / pattern.replace("*", __version__), "w") as file:
            for name, data in contents.items():
                file.writestr(name, data)
            file.writestr("x.dist-info/METADATA", f"Name: x\nVersion: {self.version}\n")

    def require(self):
        self.write()
        require_files(self.folder, self.root)


def packed(identity):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("pack.json", json.dumps({"identity": identity, "kernels": {}}))
    return data.getvalue()


@pytest.fixture
def made(tmp_path):
    return Release(tmp_path)


def test_right_files_pass(made):
    made.require()


def untracked(made):
    made.file("flash_delta/draft.py")


def more_in_the_sdist(made):
    made.sdist["build/kernels/a.zip"] = ""


def less_in_the_sdist(made):
    del made.sdist["LICENSE"]


def more_in_the_wheel(made):
    made.wheel["drafts/notes.md"] = ""


def less_in_the_wheel(made):
    del made.wheel["flash_delta/py.typed"]


def another_version(made):
    made.version = "0.0.1"


def packs_of_older_sources(made):
    made.kernels = dict.fromkeys(made.kernels, made.identity | {"sources": "older"})


def no_pack_for_the_newest_triton(made):
    made.kernels.popitem()


def packs_of_one_model(made):
    made.kernels = {name.replace("-all", "-olmo-hybrid"): identity for name, identity in made.kernels.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (untracked, r"checkout: expected one without changes, got \?\? flash_delta/draft.py"),
        (
            more_in_the_sdist,
            r"sdist: expected the files that git has, got also \['build/kernels/a.zip'\], and not \[\]",
        ),
        (less_in_the_sdist, r"sdist: .* got also \[\], and not \['LICENSE'\]"),
        (more_in_the_wheel, r"wheel: .* got also \['drafts/notes.md'\], and not \[\]"),
        (less_in_the_wheel, r"wheel: .* got also \[\], and not \['flash_delta/py.typed'\]"),
        (another_version, r"wheel: expected version .*, got 0.0.1"),
        (
            packs_of_older_sources,
            r"kernels: expected packs of these sources \(make kernels\), got .* of other \['sources'\]",
        ),
        (no_pack_for_the_newest_triton, r"kernels: expected a pack of all models for Triton 3\.9 .*, got .*3\.6"),
        (packs_of_one_model, r"kernels: expected a pack of all models for Triton 3\.6 .*, got .*-olmo-hybrid\.zip"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_file_is_refused(made, spoil, message):
    spoil(made)
    with pytest.raises(ValueError, match=message):
        made.require()


def test_a_second_file_is_refused(made):
    made.write()
    (made.folder / SDIST.replace("*", "0.0.1")).write_text("")
    with pytest.raises(ValueError, match=r"folder: expected one file flash_delta-\*\.tar\.gz in .*, got 2"):
        only_file(made.folder, SDIST)


def test_the_sdist_has_what_is_expected(tmp_path):
    if not all(map(find_spec, ("hatchling", "hatch_fancy_pypi_readme"))):
        pytest.skip("needs hatchling and hatch-fancy-pypi-readme")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=ROOT, check=True)
    with tarfile.open(only_file(tmp_path, SDIST)) as sdist:
        names = {member.name.split("/", 1)[1] for member in sdist.getmembers() if member.isfile()}
    tracked = subprocess.run(["git", "ls-files", "flash_delta"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert names == set(tracked.stdout.split()) | BESIDE


def test_the_first_example_is_the_readmes():
    assert "chunk_gated_delta_rule(q, k, v, g, beta" in installed.first_example((ROOT / "README.md").read_text())


def test_an_environment_sees_only_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "import os; print(os.environ.get('PYTHONPATH'), os.listdir())"
    assert installed.run(sys.executable, "-c", code) == "None []\n"
    with pytest.raises(
        ValueError, match=r"environment: expected python.* to run there, got exit code 1: \['.*no kernel"
    ):
        installed.run(sys.executable, "-c", "raise RuntimeError('no kernel')")


def test_an_environment_with_the_checkout_is_refused(tmp_path, monkeypatch):
    """An editable install leads there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(f"#!/bin/sh\necho {ROOT / 'flash_delta/__init__.py'}\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"environment: expected the wheels in .*, got .*flash_delta/__init__\.py"):
        installed.require_installed(Path(), "")
