"""What is built elsewhere names what this repository has: the site on Read the Docs, and an image of vLLM."""

import re
from pathlib import Path

import pytest
import yaml

from flash_delta.integrations.vllm.plugin import TESTED
from flash_delta.kernels.runtime.fastcall.built import VARIABLE
from flash_delta.packs.model import MODELS

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
IMAGE = (ROOT / "Dockerfile").read_text()


def test_the_site_is_what_make_docs_builds():
    hosted = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    make, _, copy = hosted["build"]["commands"]
    assert make == "make docs PYTHON=python"
    assert "SITE) -b html . build/docs" in re.search(r"\ndocs: .*?\n\n", MAKEFILE, re.DOTALL)[0]
    assert copy == "cp -r build/docs $READTHEDOCS_OUTPUT/html"
    assert f"Needs\n#             Python {hosted['build']['tools']['python']}. " in MAKEFILE


def argument(name):
    return re.search(rf"^ARG {name}=(\S+)$", IMAGE, re.MULTILINE)[1]


def test_the_image_has_the_vllm_that_ran_on_gpus():
    """The version of the README's table, and one in which the plugin is on by itself."""
    version = argument("VLLM")
    (row,) = re.findall(r"^\| vLLM \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert f"{version} on an H100 and an H200" in row
    assert ".".join(version.split(".")[:2]) in TESTED
    assert "FROM vllm/vllm-openai:v${VLLM}\n" in IMAGE


def test_the_image_has_a_pack_that_exists():
    packing = pytest.importorskip("flash_delta.compiler.packing", exc_type=ImportError)
    models = [argument("MODEL"), *re.findall(r"--build-arg MODEL=(\S+)", IMAGE)]
    parts = [argument("TP"), *re.findall(r"--build-arg TP=(\d+)", IMAGE)]
    for model, part in zip(models, parts, strict=True):
        assert MODELS[model].served
        assert int(part) in MODELS[model].parts
    assert {argument("TARGET"), *re.findall(r"--build-arg TARGET=(\S+)", IMAGE)} <= packing.GPUS.keys()


def test_the_image_finds_its_pack():
    out = re.search(r"^RUN flash-delta pack .* --out (\S+)$", IMAGE, re.MULTILINE)[1]
    assert re.search(rf"^ENV {VARIABLE}={out}$", IMAGE, re.MULTILINE)


def test_the_image_installs_what_is_there():
    """Files that the build of the wheel reads, and the package."""
    copied = re.findall(r"^COPY (.*) /opt/flash-delta\S*$", IMAGE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "flash_delta"}
    assert all((ROOT / name).exists() for name in names)
