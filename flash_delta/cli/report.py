"""`flash-delta report`: one HTML page about a trained run."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.environment import quiet_transformers, require_device


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `flash-delta train --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; none: report.html in the run's folder.")] = None,
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, ...")] = "cpu",
) -> None:
    """Write a self-contained page: numbers, loss, what the memory does, and a sample."""
    from flash_delta.training import Trainer, order0_entropy, write_report

    quiet_transformers()
    page = out or run / "report.html"
    trainer = Trainer.resume(run, require_device(device))
    bits, entropy = write_report(trainer, page), order0_entropy(trainer.corpus.held_out)
    typer.echo(f"wrote {page}: {bits:.3f} bits per byte on held-out text, whose order-0 entropy is {entropy:.3f}")
