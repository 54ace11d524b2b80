"""The documentation keeps its word: the README's examples run, the mathematics is proven."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.split("from ")[1].split(" ")[0])
def test_readme_example(example):
    exec(compile(example, "README.md", "exec"), {})


def test_readme_has_examples():
    assert len(EXAMPLES) == 5


def test_mathematics():
    out = subprocess.run(
        [sys.executable, ROOT / "docs/check_math.py"], check=True, capture_output=True, text=True
    ).stdout
    assert "all assertions hold" in out
    proven = set(re.findall(r"^([A-Z]\d)\b", out, re.MULTILINE))
    quoted = set(re.findall(r"\[([A-Z]\d)(?:-([A-Z]\d))?", (ROOT / "docs/mathematics.md").read_text()))
    assert {tag for pair in quoted for tag in pair if tag} <= proven


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link
