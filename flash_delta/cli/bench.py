"""`flash-delta bench`: how fast this library and its peers are here, row by row of the published tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from flash_delta.cli.environment import require_device

if TYPE_CHECKING:
    from flash_delta.bench import Group, Result

RESULTS = Path("benchmarks/results")


def bench(
    groups: Annotated[list[str] | None, typer.Argument(help="Groups of rows; none: all that the device runs.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cuda",
    contestants: Annotated[
        str | None, typer.Option(help="Comma-separated names; none: all that are installed.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Only rows whose name contains this.")] = None,
    results: Annotated[Path, typer.Option(help="Where the JSON goes, in a folder per GPU.")] = RESULTS,
    compare: Annotated[
        Path | None, typer.Option(help="An older folder of results; exit code 1 if ours got slower.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one contestant may take for one step of a row.")] = 300,
) -> None:
    """Time every contestant on every row: CUDA graph, eager, first call, host, memory, distance from the floor.

    Outputs (and gradients) are compared with float64 first; a wrong result gets no time. Results are written after
    every row, one file per group.
    """
    from flash_delta.bench import Group, ceilings, folder, machine, run_group, select, versions

    where = require_device(device)
    console = Console()
    console = Console(width=max(console.width, 160)) if not console.is_terminal else console
    installed = versions(contestants)
    rates = ceilings(where) if where.type == "cuda" else None
    slower = False
    for name, workloads in select(groups, where, rows).items():
        group, path = Group(name, machine(where), installed, rates), results / folder(where) / f"{name}.json"
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(name, total=len(workloads) * len(installed))
            for result in run_group(workloads, tuple(installed), where, rates, timeout):
                group.results.append(result)
                group.write(path)
                progress.advance(task)
        console.print(_table(group))
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
        if compare is not None:
            slower |= _compare(console, Group.read(compare / f"{name}.json"), group)
    if slower:
        raise typer.Exit(1)


def _table(group: "Group") -> Table:
    table = Table("row", "contestant", title=f"{group.group}: {group.machine.get('gpu', 'CPU')}")
    columns = "graph ms", "p10-p90", "eager ms", "x floor", "first call s", "host us", "peak MB", "saved MB", "error"
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("remarks")
    for row, results in group.rows().items():
        times = [result.ms.median for result in results if result.ms is not None]
        for number, result in enumerate(results):
            best = result.ms is not None and result.ms.median == min(times)
            label = Text(row if number == 0 else "")
            table.add_row(label, result.contestant, *_numbers(result), _remarks(result), style="bold" if best else None,
                          end_section=number == len(results) - 1)  # fmt: skip
    return table


def _numbers(result: "Result") -> list[str]:
    def shown(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    graph, eager, costs = result.graph_ms, result.eager_ms, result.costs
    ratio = result.ms.median / result.floor_ms if result.ms and result.floor_ms else None
    return [
        shown(graph and graph.median, 3),
        f"{graph.low:.3f}-{graph.high:.3f}" if graph else "",
        shown(eager and eager.median, 3),
        shown(ratio, 1),
        shown(result.first_call_s, 1) + ("*" if result.cold else ""),
        shown(costs and costs.host_us, 0),
        shown(costs and costs.peak_mb, 0),
        shown(costs and costs.saved_mb, 1),
        f"{max(result.errors.values()):.0e}" if result.errors else "",
    ]


def _remarks(result: "Result") -> Text:
    remarks = [result.reason] if result.reason else list(result.notes)
    if result.lengths is not None:
        n = result.lengths
        compiled = "" if n.compilations is None else f", {n.compilations} compilations by Triton"
        remarks.append(f"{n.tried} random lengths: {n.stalls} stalls, {n.stalled_s:.1f} s{compiled}")
    return Text("; ".join(remarks))


def _compare(console: Console, old: "Group", new: "Group") -> bool:
    """Print what moved; whether this library got slower or lost a row."""
    from flash_delta.bench import changes

    ours_slower = False
    for change in changes(old, new):
        before, after = (f"{ms:.3f} ms" if ms else "no time" for ms in (change.old_ms, change.new_ms))
        style, word = ("red", "slower") if change.slower else ("green", "faster")
        console.print(f"{word}: {change.contestant}, {change.row}: {before} -> {after}", style=style, soft_wrap=True)
        ours_slower |= change.slower and change.contestant == "flash_delta"
    return ours_slower
