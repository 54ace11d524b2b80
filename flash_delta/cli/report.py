"""`flash-delta report`: HTML pages, about a trained run or about the benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.bench import RESULTS
from flash_delta.cli.environment import quiet_transformers, require_device
from flash_delta.cli.files import PATH, RUN, reading, require_writable
from flash_delta.cli.train import train_command


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="The folder that `flash-delta train --out` wrote; none: the benchmarks.", **RUN),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's page, or the benchmarks' folder; none: report.html in the run, docs.", **PATH),
    ] = None,
    device: Annotated[str, typer.Option(help="Where a run's model runs: cpu, cuda, ...")] = "cpu",
    results: Annotated[Path, typer.Option(help="What `flash-delta bench` wrote.", **PATH)] = RESULTS,
) -> None:
    """Write a self-contained page about a run, or the pages and drawings about the benchmarks.

    A run's report.html has its numbers, its command, loss, time per step, memory and a sample. Of the benchmarks come
    benchmarks.md, benchmarks.html, and the chart of speed as speed-light.svg and speed-dark.svg.
    """
    if run is None:
        from flash_delta.bench.page import write_benchmarks

        with reading("results", results, "flash-delta bench"):
            written = write_benchmarks(results, out or Path("docs"))
        for path in written:
            typer.echo(f"wrote {path}")
        return
    from flash_delta.training import Run, load_model, require_checkpoint, write_report

    quiet_transformers()
    where, found, page = require_device(device), Run.read(run), out or run / "report.html"
    require_writable("out", page)
    model = load_model(require_checkpoint(run)).to(where)
    write_report(found, model, page, train_command(found, model.config, run))
    bits = "no" if found.held_out is None else f"{found.held_out:.3f}"
    entropy = f"{found.corpus.entropy:.3f}"
    typer.echo(f"wrote {page}: {bits} bits per byte on held-out text, whose order-0 entropy is {entropy}")
