"""The guide keeps its word: every block of every page runs, in order, on a CPU."""

import contextlib
import inspect
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_tables import rows, words
from typer.testing import CliRunner

import flash_delta
from flash_delta.cli import prove
from flash_delta.cli.app import app
from flash_delta.ops.serving import Convolution, Ring, commit

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs/guide").glob("*.md"))
RULES = ("gated_delta_rule", "kda")
NEEDS = {"evaluating.md": "lm_eval"}  # what a page runs that `make test` does not install; `make engines` does


@pytest.fixture(autouse=True)
def deterministic_mode():
    """A page may leave it on."""
    yield
    torch.use_deterministic_algorithms(False)


def run(line, folder):
    """One command as it stands, but where it says cuda, cpu."""
    program, *arguments = shlex.split(line.replace("--device cuda", "--device cpu"))
    if arguments[:2] == ["install", "--index-url"]:
        assert line.removeprefix("pip install ") in (ROOT / "Makefile").read_text()
    elif program == "pip":  # not installed again, but what is asked for is there
        what = re.fullmatch(r"\.(?:\[(\w+)\])?", arguments[1])
        assert arguments[0] == "install"
        assert what[1] is None or f"\n{what[1]} = [" in (ROOT / "pyproject.toml").read_text(), line
    elif program == "flash-delta":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    else:
        start = {"torchrun": ["-m", "torch.distributed.run"], "python": []}[program]
        arguments = [str(ROOT / a) if a.startswith("examples/") else a for a in arguments]
        subprocess.run([sys.executable, *start, *arguments], check=True, cwd=folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_runs(page, tmp_path, monkeypatch):
    if page.name in NEEDS and find_spec(NEEDS[page.name]) is None:
        pytest.skip(f"it needs {NEEDS[page.name]}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "QUICK", ("parity",))  # `test_proof.py` learns all of them, which takes long
    names = {}
    for language, block in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL):
        if language == "python":
            exec(compile(block, page.name, "exec"), names)
        else:
            assert language == "bash"
            for line in block.splitlines():
                run(line, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/guide/README.md").read_text()
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")


def test_the_message_that_is_quoted(capsys):
    page = (ROOT / "docs/guide/troubleshooting.md").read_text()
    with contextlib.suppress(StopIteration):
        exec(next(re.finditer(r"```python\n(.*?)```", page, re.DOTALL))[1], {})
    assert f"# {capsys.readouterr().out.strip()}\n" in page


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_every_tensor_of_an_engine_has_an_argument(engine):
    """One that exists: of the serving ops, or a field of what they take."""
    ops = [getattr(flash_delta, f"{call}_{rule}") for call in ("decode", "prefill") for rule in RULES]
    arguments = {name for op in ops for name in inspect.signature(op).parameters}
    arguments |= {*Convolution._fields, *Ring._fields, *inspect.signature(commit).parameters}
    spoken = {"True", "Convolution", "decode_", "prefill_"}
    spoken |= {"target_verify", "commit", "kv_cache", "transpose", "a", "b"}  # of the engines
    table = rows(engine)
    assert len(table) > 10
    for _, _, argument in table:
        assert words(argument) & arguments, argument
        assert not words(argument) - arguments - spoken, argument
