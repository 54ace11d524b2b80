"""`flash-delta-dev report`: the pages and drawings about the benchmarks, and the numbers in README and guide."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.files import PATH, reading
from workshop.cli.bench import RESULTS


def report(
    out: Annotated[Path, typer.Option(help="The benchmarks' folder.", **PATH)] = Path("docs"),
    results: Annotated[Path, typer.Option(help="What `flash-delta-dev bench` wrote.", **PATH)] = RESULTS,
) -> None:
    """Write benchmarks.md, benchmarks.html, the chart of speed as speed-light.svg and speed-dark.svg, and the measured
    numbers in README and guide beside that folder.

    It also writes the table of reports in machines.md, if this page is there, from RESULTS/machines.
    """
    from workshop.bench.page import write_benchmarks
    from workshop.machine.page import write_machines
    from workshop.numbers.pages import write_numbers

    with reading("results", results, "flash-delta-dev bench"):
        written = write_benchmarks(results, out) + write_numbers(results, out.parent)
    if (page := out / "machines.md").is_file():
        with reading("results", results / "machines", "flash-delta-dev machine"):
            written.append(write_machines(results / "machines", page))
    for path in written:
        typer.echo(f"wrote {path}")
