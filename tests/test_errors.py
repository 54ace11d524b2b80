"""Errors of the package, outside of kernels, say what was expected and what came."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for path in sorted(ROOT.glob("flash_delta/**/*.py")) if "kernels" not in path.relative_to(ROOT).parts]
FILES += sorted(ROOT.glob("workshop/**/*.py"))
# Messages that say it in other words: no backend fits, something has its own words, a computation went wrong.
OTHER_WORDS = (
    "cannot run this: ",
    "no backend can run this",
    "model: {entry}",
    "folder: {wrong}",
    "a second derivative is asked for",
    "away from the first call's",
    "a kernel {what} beyond its tensors",
    "has no attribute",
)


def text(message: ast.expr) -> str:
    """A string's words, with ``{names}`` where it has values."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    parts = message.values if isinstance(message, ast.JoinedStr) else []
    return "".join(p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}" for p in parts)


def raised():
    """The messages of what a file raises, if they are written there."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                words = text(node.exc.args[0])
                if ast.unparse(node.exc.func).endswith("Error") and words:
                    yield pytest.param(words, id=f"{path.relative_to(ROOT)}:{node.lineno}")


@pytest.mark.parametrize("words", list(raised()))
def test_an_error_says_what_was_expected_and_what_came(words):
    """``argument: expected this, got that``."""
    if not any(other in words for other in OTHER_WORDS):
        name, _, said = words.partition(": ")
        assert name
        assert "expected " in said
        assert ", got" in said
