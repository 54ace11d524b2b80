"""`flash-delta report`: an HTML page about a trained run."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.environment import quiet_transformers, require_device
from flash_delta.cli.files import PATH, RUN, require_writable
from flash_delta.cli.train import train_command


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `flash-delta train --out` wrote.", **RUN)],
    out: Annotated[Path | None, typer.Option(help="The page; none: report.html in the run.", **PATH)] = None,
    device: Annotated[str, typer.Option(help="Where the run's model runs: cpu, cuda, ...")] = "cpu",
) -> None:
    """Write a self-contained page about a run: its numbers, its command, loss, time per step, memory and a sample."""
    from flash_delta.training import Run, load_model, require_checkpoint, write_report

    quiet_transformers()
    where, found, page = require_device(device), Run.read(run), out or run / "report.html"
    require_writable("out", page)
    model = load_model(require_checkpoint(run)).to(where)
    write_report(found, model, page, train_command(found, model.config, run))
    bits = "no" if found.held_out is None else f"{found.held_out:.3f}"
    entropy = f"{found.corpus.entropy:.3f}"
    typer.echo(f"wrote {page}: {bits} bits per byte on held-out text, whose order-0 entropy is {entropy}")
