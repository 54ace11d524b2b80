"""Who waits for whom in the Hopper kernels stands beside every wait, and what they share stands once."""

import ast
from collections import Counter
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent / "flash_delta" / "kernels"
SIGNALLED, WARPS = "ignalled by", "all warps of"
SAYS = {"mbarrier.wait": SIGNALLED, "wait_free": SIGNALLED, "barrier": WARPS}


def unsaid(source: str) -> list[str]:
    """The waits with no comment, at the end of their line or on the line before, that says who completes them."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in SAYS:
            own, before = lines[node.lineno - 1], lines[node.lineno - 2].strip()
            comment = own.partition("#")[2] or (before if before.startswith("#") else "")
            if SAYS[name] not in comment:
                found.append(f"{node.lineno}: {own.strip()}")
    return found


@pytest.mark.parametrize("path", sorted((KERNELS / "hopper").rglob("*.py")), ids=lambda path: path.stem)
def test_every_wait_says_who_signals_it(path):
    assert unsaid(path.read_text()) == []


def test_a_wait_that_does_not_say_is_found():
    said = [
        "mbarrier.wait(full, 0)  # signalled by the copy engine: k is there",
        "# all warps of it: done",
        "barrier()",
    ]
    assert unsaid("\n".join(said)) == []
    assert len(unsaid("wait_free(done, t, 2, 4)\nbarrier()  # k is there\nx = 1\nmbarrier.wait(full, 0)\n")) == 3


def test_roles_and_the_scalar_gate_stand_once():
    names, softplus = Counter(), Counter()
    for path in KERNELS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        hopper = "hopper" in path.parts
        names.update(f.name for f in tree.body if hopper and isinstance(f, ast.FunctionDef) and "load_" in f.name)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        softplus[path.name] += sum(ast.unparse(call.func).endswith("softplus") for call in calls)
    twice = {name for name, count in names.items() if count > 1}
    assert not twice
    assert "load_role" in names
    assert +softplus == {"gates.py": 2}, "one gate per head, one per channel"
