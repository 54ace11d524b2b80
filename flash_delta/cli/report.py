"""`flash-delta report`: HTML pages, about a trained run or about the benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.bench import RESULTS
from flash_delta.cli.environment import quiet_transformers, require_device


def report(
    run: Annotated[
        Path | None, typer.Argument(help="The folder that `flash-delta train --out` wrote; none: the benchmarks.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's page, or the benchmarks' folder; none: report.html in the run, docs.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to measure a run: cpu, cuda, ...")] = "cpu",
    results: Annotated[Path, typer.Option(help="What `flash-delta bench` wrote.")] = RESULTS,
) -> None:
    """Write self-contained pages: a run's numbers, loss, memory and a sample; or benchmarks.md and benchmarks.html."""
    if run is None:
        from flash_delta.bench.page import write_benchmarks

        for path in write_benchmarks(results, out or Path("docs")):
            typer.echo(f"wrote {path}")
        return
    from flash_delta.training import Trainer, order0_entropy, write_report

    quiet_transformers()
    page = out or run / "report.html"
    trainer = Trainer.resume(run, require_device(device))
    bits, entropy = write_report(trainer, page), order0_entropy(trainer.corpus.held_out)
    typer.echo(f"wrote {page}: {bits:.3f} bits per byte on held-out text, whose order-0 entropy is {entropy:.3f}")
