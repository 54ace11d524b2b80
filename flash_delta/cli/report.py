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
