"""A report of a machine as a file: versions, hardware, the check, times, and what failed."""

import getpass
import json
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.bench import Group, Result

PARTS = ("machine", "backends", "failures", "check", "bench")
NAME = r"""[^\s/\\"'`:,;()\[\]{}<>|=]+"""
# Paths from a root, a home or a folder above, also behind an option (-I/usr), an address (file:///usr) or the \n of a
# quoted text. Not paths below the folder of work, quotients of numbers (16/32) and addresses of the web.
PATHS = re.compile(
    r"(?:file://|(?<![\w./\])~])|(?<=\\[nrt])|(?<=\s-[a-zA-Z])|(?<=-isystem))"
    rf"(?:~{NAME}|~|\.\.(?:/\.\.)*)?(?:/{NAME})+/?|\b[A-Za-z]:(?:[\\/]+{NAME})+"
)
COLOURS = re.compile(r"\x1b\[[\d;]*m")
SOURCES = r"\.(?:pyx?|so[\d.]*|c|cc|cpp|h|cuh?|ptx|cubin|o|json|\w*ir|hsaco|amdgcn)$"  # their names stay


@dataclass
class Report:
    """What was found on a machine. Parts that could not be asked are missing, and ``broken`` says why."""

    machine: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, Any] = field(default_factory=dict)
    check: list[dict[str, Any]] = field(default_factory=list)  # the lines of `flash-delta check --json`
    bench: Group | None = None
    broken: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Everything that failed or was wrong, each with its error."""
        return [*self.broken, *self._of_check(), *self._of_bench()]

    def _of_check(self) -> Iterator[str]:
        for line in self.check:
            place = f"{line['op']} {line['dtype']}, case {line['case']!r}"
            if "failure" in line:
                yield f"{place}: {line['failure']}"
            for tensor, (error, allowed, _) in line["errors"].items():
                if not error <= allowed:
                    yield f"{place}: {tensor} is off by {error:.1e}, {allowed:.1e} is allowed"

    def _of_bench(self) -> Iterator[str]:
        for result in self.bench.results if self.bench else ():
            if result.reason is not None:
                yield f"{name_of(result)}: {result.reason}"

    def write(self, path: Path) -> None:
        """Writes JSON, with a line for each failure and case. Paths and the host's name are taken out."""
        bench = self.bench and self.bench.plain()
        head = {"machine": self.machine, "backends": self.backends, "failures": self.failures(), "check": self.check}
        parts = without_names(head | {"bench": bench})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{" + ",\n ".join(f'"{name}": {_lines(part)}' for name, part in parts.items()) + "}\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or tuple(data) != PARTS:
            raise ValueError(f"results: expected a file that `flash-delta-dev machine` wrote, got {path}")
        bench = data["bench"] and Group.of(data["bench"])
        found = cls(data["machine"], data["backends"], data["check"], bench)
        found.broken = [failure for failure in data["failures"] if failure not in found.failures()]
        return found


def name_of(result: Result) -> str:
    """The row of a benchmark with its member of the family."""
    return f"{result.workload.member} {result.row}"


def without_names(value: Any) -> Any:
    """The value without paths, of which the name of a source remains, and without the names of user and host."""
    if isinstance(value, dict):
        return {name: without_names(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(v) for v in value]
    if not isinstance(value, str):
        return value
    text, home = COLOURS.sub("", value), str(Path.home())
    text = PATHS.sub(_file_name, text.replace(home, "/home") if len(home) > 1 else text)
    for name in sorted(_private(), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(name)", text, flags=re.IGNORECASE)
    return text


def _private() -> set[str]:
    """The names of this host and user, except those that say nothing."""
    found = {platform.node(), platform.node().split(".")[0], socket.getfqdn(), Path.home().name}
    with suppress(KeyError, OSError):  # a user without a name
        found.add(getpass.getuser())
    return {name for name in found if len(name) > 1} - {"localhost", "root"}


def _file_name(path: re.Match) -> str:
    last = re.split(r"[/\\]", path[0].rstrip("/\\"))[-1]
    return f"(path)/{last}" if re.search(SOURCES, last) else "(path)"


def _lines(part: Any) -> str:
    if not isinstance(part, list):
        return json.dumps(part)
    return "[\n  " + ",\n  ".join(map(json.dumps, part)) + "\n ]" if part else "[]"
