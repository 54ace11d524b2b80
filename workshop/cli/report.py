"""`flash-delta-dev report`: the pages and drawings about the benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.files import PATH, reading
from workshop.cli.bench import RESULTS


def report(
    out: Annotated[Path, typer.Option(help="The benchmarks' folder.", **PATH)] = Path("docs"),
    results: Annotated[Path, typer.Option(help="What `flash-delta-dev bench` wrote.", **PATH)] = RESULTS,
) -> None:
    """Write benchmarks.md, benchmarks.html, and the chart of speed as speed-light.svg and speed-dark.svg.

    It also writes the table of reports in machines.md, if this page is there, from RESULTS/machines.
    """
    from workshop.bench.page import write_benchmarks
    from workshop.machine.page import write_machines

    with reading("results", results, "flash-delta-dev bench"):
        written = write_benchmarks(results, out)
    if (page := out / "machines.md").is_file():
        with reading("results", results / "machines", "flash-delta-dev machine"):
            written.append(write_machines(results / "machines", page))
    for path in written:
        typer.echo(f"wrote {path}")
