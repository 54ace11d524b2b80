"""What is installed: the wheel's files and words, the types that users get, and what an import needs."""

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import flash_delta
from flash_delta.integrations._fla_mirror import homes
from flash_delta.integrations._fla_names import FLA, PATHS

ROOT = Path(__file__).parent.parent
# Modules that one system or another does not have. torch itself may need some: they are taken away after its import.
OF_SOME_SYSTEMS = ("fcntl", "grp", "msvcrt", "pty", "pwd", "resource", "termios", "tty", "winreg")
CALLS_OF_SOME_SYSTEMS = ("fork", "getuid", "register_at_fork", "sched_getaffinity", "setsid")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not all(map(find_spec, ("hatchling", "hatch_fancy_pypi_readme"))):
        pytest.skip("needs hatchling and hatch-fancy-pypi-readme")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (path,) = folder.iterdir()
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "flash_delta"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == set(tracked.stdout.split())
    stub = f"{FLA.replace('.', '/')}/ops/kda/chunk.pyi"
    assert {"flash_delta/py.typed", "flash_delta/kernels/runtime/fastcall/key.c", stub} <= files
    assert "flash_delta/compiler/fake_cuda.c" in files


def test_the_wheel_of_kernels_is_found_by_its_name(tmp_path):
    if find_spec("hatchling") is None:
        pytest.skip("needs hatchling")
    shutil.copytree(ROOT / "wheel", tmp_path / "wheel")
    for path, text in {"flash_delta/__init__.py": '__version__ = "0.1.2"', "build/kernels/a.zip": "pack"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=tmp_path / "wheel", check=True)
    (path,) = tmp_path.glob("*.whl")
    assert path.name == f"flash_delta_kernels-0.1.2-py3-none-manylinux_2_17_{platform.machine()}.whl"
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "installed")
    code = "from flash_delta.kernels.runtime.fastcall.built import folders; print(*folders())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'installed'}{os.pathsep}{ROOT}"}
    environment.pop("FLASH_DELTA_KERNELS", None)
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    folder = tmp_path / "installed/flash_delta_kernels"
    assert found.stdout.split() == [str(folder)]
    assert (folder / "a.zip").read_text() == "pack"


def test_an_extra_brings_the_kernels_of_this_version():
    extra = f'\nkernels = ["flash-delta-kernels=={flash_delta.__version__}"]'
    assert extra in (ROOT / "pyproject.toml").read_text()


def test_the_long_description_leads_nowhere_else(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "chunk_gated_delta_rule(q, k, v, g, beta" in text
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", prose) == []
    assert not re.search(r"<(img|picture|source|a)\b|!\[|<!--", prose)
    assert metadata.get_all("Project-URL") is None
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def mypy(*files, cache=ROOT / ".mypy_cache"):
    config = "[mypy]\nstrict = True\n[mypy-flash_delta.*]\nfollow_imports = silent\n"
    config += "[mypy-transformers.*,sympy.*,numpy.*]\nfollow_imports = skip\n"  # they take longer than all others
    (cache / "config").parent.mkdir(exist_ok=True)
    (cache / "config").write_text(config)
    options = ["--config-file", cache / "config", "--cache-dir", cache, "--python-executable", sys.executable]
    command = [sys.executable, "-m", "mypy", *options, *files]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_types_of_a_users_code(tmp_path):
    """What a user writes passes `mypy --strict`; and a wrong call does not."""
    (tmp_path / "wrong.py").write_text(
        "import torch\nfrom flash_delta import chunk_kda\nfrom flash_delta.layers import MixerState\n"
        "x = torch.zeros(1)\nchunk_kda(x, x, x, x, 'beta')\nMixerState().recurrent.shape\n"
    )
    (tmp_path / "absent.py").write_text(
        "from flash_delta.integrations import fla\nfrom flash_delta.integrations.fla.ops.kda import chunk_comba\n"
        "import flash_delta.integrations.fla.ops.gla\nfla.enable\n"
    )
    (tmp_path / "present.py").write_text(
        "".join(f"from {FLA}.{path} import {name}\n" for path in PATHS for name in homes(path))
    )
    files = [tmp_path / name for name in ("wrong.py", "absent.py", "present.py")]
    found = mypy(ROOT / "tests/typing/user.py", *files)
    places = re.findall(r"(\w+\.py:\d+): error", found)
    assert places == ["wrong.py:5", "wrong.py:6", "absent.py:2", "absent.py:3", "absent.py:4"], found


def test_no_system_is_excluded_by_an_import():
    code = f"""
import os, sys
import torch, transformers.trainer, matplotlib.pyplot, rich.console, typer, safetensors.torch
import torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.checkpoint, transformers.modeling_utils
import transformers.modeling_layers, transformers.generation, transformers.models.auto.modeling_auto
for name in {OF_SOME_SYSTEMS}:
    sys.modules[name] = None
for name in {CALLS_OF_SOME_SYSTEMS}:
    vars(os).pop(name, None)
import flash_delta.cli.app, flash_delta.cli.plain, flash_delta.training, flash_delta.integrations.fla
import flash_delta.testing.judging, flash_delta.layers, flash_delta.ops.serving, flash_delta.parallel
import flash_delta.integrations.transformers, workshop.cli.app
q = torch.randn(1, 5, 2, 8)
flash_delta.chunk_delta_rule(q, q, q, torch.rand(1, 5, 2))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_older_triton_is_none(tmp_path):
    """Kernels are compiled under 3.6 and later. A Triton before that is as good as none, and is named."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("__version__ = '3.4.0'\n")
    code = """
import torch, flash_delta
with flash_delta.forbid_compilation():
    q = torch.randn(1, 5, 2, 8)
    flash_delta.chunk_delta_rule(q, q, q, q[..., 0])
x = q.to("meta")
reasons = flash_delta.explain(flash_delta.chunk_delta_rule, x, x, x, x[..., 0]).reasons
assert reasons["triton"] == reasons["hopper"] == "cannot: triton >= 3.6 is not installed", reasons
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


PYTORCH = "--index-url https://download.pytorch.org/whl/cpu torch"


@pytest.mark.parametrize(
    ("gpu", "config", "fails", "tries"),
    [
        pytest.param(False, "", False, True, id="a CPU"),
        pytest.param(False, "", True, True, id="an index that does not answer"),
        pytest.param(False, "global.extra-index-url='file:///simple'", False, False, id="an index of the user's"),
        pytest.param(True, "", False, False, id="a GPU"),
    ],
)
def test_make_takes_torch_for_cpus(tmp_path, gpu, config, fails, tries):
    """Without a GPU and without an index of the user's, `make` asks for PyTorch's build for CPUs. It may fail."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    pip = f"""if [ "$1" = config ]; then echo "{config}"; exit; fi
echo "$@" >> log
case "$*" in *pytorch.org*) exit {fails:d};; esac"""
    for path, text in {"bin/pip": pip, "bin/nvidia-smi": f"exit {not gpu:d}"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / path).chmod(0o755)
    for path in (".venv/x", "pyproject.toml", "workshop/pyproject.toml", "constraints.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    command = ["make", "-f", ROOT / "Makefile", ".venv/installed", "PYTHON=true", "BIN=bin"]
    subprocess.run(command, cwd=tmp_path, check=True, env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    *first, last = (tmp_path / "log").read_text().splitlines()
    assert last == "install -q -c constraints.txt -e .[dev] -e workshop"
    assert [line.endswith(PYTORCH) and "--no-deps" in line for line in first] == [True] * tries
    assert (tmp_path / ".venv/installed").exists()
