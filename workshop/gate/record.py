"""Reads and writes the committed facts, a file per version of Triton. Their diff shows what a commit changes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flash_delta.compiler.pool import Result

Rows = dict[str, dict[str, Any]]  # "kernel @ target" -> facts


def key_of(result: Result) -> str:
    return f"{result.kernel} @ {result.target}"


def rows(results: Iterable[Result]) -> Rows:
    return {key_of(r): r.facts for r in results if r.facts is not None}


def read(path: Path) -> Rows:
    return json.loads(path.read_text())


def write(path: Path, new: Rows) -> None:
    """One line per kernel and target, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(new[key])}" for key in sorted(new))
    path.write_text(f"{{\n{lines}\n}}\n")


def within(recorded: Rows, modules: list[str], targets: list[str]) -> Rows:
    """The rows that a run over these modules and targets would replace."""
    return {k: v for k, v in recorded.items() if k.split("/")[0] in modules and k.split(" @ ")[1] in targets}


def changes(old: Rows, new: Rows) -> list[str]:
    """``row: fact old -> new, ...`` for every row that differs. A row's ``key`` may differ alone."""
    changed = [f"{key}: recorded, but not there any more" for key in sorted(old.keys() - new.keys())]
    changed += [f"{key}: not recorded yet" for key in sorted(new.keys() - old.keys())]
    for key in sorted(old.keys() & new.keys()):
        names = [name for name in old[key] | new[key] if old[key].get(name) != new[key].get(name)]
        if names:
            moves = [f"{name} {old[key].get(name, 0)} -> {new[key].get(name, 0)}" for name in names if name != "key"]
            changed.append(f"{key}: {', '.join(moves) or 'the same facts, of other code'}")
    return changed
