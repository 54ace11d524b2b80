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
    from flash_delta.report import Run, write_report
    from flash_delta.training import load_model, load_tokenizer, require_checkpoint

    quiet_transformers()
    where, checkpoint, page = require_device(device), require_checkpoint(run), out or run / "report.html"
    found = Run.read(run)
    require_writable("out", page)
    model, tokenizer = load_model(checkpoint).to(where), load_tokenizer(str(checkpoint))
    write_report(found, model, tokenizer, page, train_command(found.settings, run))
    entropy = f"{found.corpus.entropy:.3f}"
    typer.echo(f"wrote {page}: {found.held_out} bits per byte on held-out text, whose order-0 entropy is {entropy}")
