"""`flash-delta-dev bench`: how fast this library and its peers are here, row by row of the published tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from flash_delta.cli.environment import require_device
from flash_delta.cli.files import PATH, reading, require_writable

if TYPE_CHECKING:
    from workshop.bench import Group

RESULTS = Path("benchmarks/results")
LONGEST_S = 86_400


def bench(
    groups: Annotated[list[str] | None, typer.Argument(help="Groups of rows; none: all that the device runs.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cuda",
    contestants: Annotated[
        str | None, typer.Option(help="Comma-separated names; none: all that are installed.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Only rows whose name contains this.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Where the JSON goes; none: benchmarks/results, and nowhere for a part of a group.", **PATH),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only the rows that the results file still lacks.")] = False,
    keep_caches: Annotated[
        bool,
        typer.Option("--keep-caches", help="Compile into the caches that are there; first calls then get no time."),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(help="Older results, a file or a folder like --results; exit code 1 if ours got slower.", **PATH),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one contestant may take for one step of a row.")] = 300,
) -> None:
    """Time every contestant on every row: CUDA graph, eager, first call, host, memory, distance from the floor.

    Outputs (and gradients) are compared with float64 first; a wrong result gets no time. Results are written after
    every row, one file per group.
    """
    from flash_delta.testing.machine import machine
    from workshop.bench import Group, ceilings, digests, folder, run_group, select, taking_part, versions

    if not 0 < timeout <= LONGEST_S:
        raise ValueError(f"timeout: expected more than 0 and at most {LONGEST_S:,} seconds, got {timeout}")
    where = require_device(device)
    target = results or (None if rows or contestants else RESULTS)  # part of a run must not replace the whole
    console = Console()
    console = Console(width=max(console.width, 160)) if not console.is_terminal else console
    installed, chosen = versions(contestants), select(groups, where, rows)
    paths = {name: target and target / folder(where) / f"{name}.json" for name in chosen}
    older = {name: _older(compare, folder(where), name) for name in chosen} if compare is not None else {}
    resumed = {name: _read("resume", path) for name, path in paths.items() if resume and path and path.exists()}
    for path in filter(None, paths.values()):
        require_writable("results", path)
    rates = ceilings(where) if where.type == "cuda" else None
    slower = False
    for name, workloads in chosen.items():
        kernels = digests() if where.type == "cuda" else {}  # a CPU runs none of them
        group, path = Group(name, machine(where), taking_part(name, installed), rates, kernels=kernels), paths[name]
        if name in resumed:
            group = _resumed(resumed[name], group)
            workloads = group.missing(workloads)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(name, total=len(workloads) * len(group.versions))
            for result in run_group(workloads, tuple(group.versions), where, rates, timeout, keep_caches):
                group.results.append(result)
                if path is not None:
                    group.write(path)
                progress.advance(task)
        show(console, group)
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
        if name in older:
            slower |= _compare(console, older[name], group)
    if slower:
        raise typer.Exit(1)


def _older(compare: Path, device: str, group: str) -> "Group":
    return _read("compare", compare if compare.is_file() else compare / device / f"{group}.json")


def _read(option: str, path: Path) -> "Group":
    from workshop.bench import Group

    with reading(option, path, "flash-delta-dev bench"):
        return Group.read(path)


def _resumed(old: "Group", new: "Group") -> "Group":
    """The results of a broken run, if it had the same machine, the same versions and the same kernels."""
    for what in ("machine", "versions", "kernels"):
        if getattr(old, what) != getattr(new, what):
            raise ValueError(
                f"resume: expected the {what} of the results, {getattr(old, what)}, got {getattr(new, what)}"
            )
    return old


def show(console: Console, group: "Group") -> None:
    """Prints the tables and remarks of a group."""
    from workshop.bench import tables

    title = f"{group.group}, {group.machine.get('gpu', 'CPU')}"
    for words in tables.of(group):
        table = Table(
            *(Column(name, justify="right" if i else "left") for i, name in enumerate(words.head)), title=title
        )
        for row in words.rows:
            table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in row))
        console.print(table)
    for remark in tables.remarks(group):
        console.print(remark, soft_wrap=True, markup=False, highlight=False)


def _compare(console: Console, old: "Group", new: "Group") -> bool:
    """Print the times that changed. Return whether this library got slower or lost a row."""
    from workshop.bench import changes

    ours_slower = False
    for change in changes(old, new):
        before, after = (f"{ms:.3f} ms" if ms else "no time" for ms in (change.old_ms, change.new_ms))
        style, word = ("red", "slower") if change.slower else ("green", "faster")
        console.print(f"{word}: {change.contestant}, {change.row}: {before} -> {after}", style=style, soft_wrap=True)
        ours_slower |= change.slower and change.contestant == "flash_delta"
    return ours_slower
