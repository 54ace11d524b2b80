"""`flash-delta generate`: prints text of a trained model while the model writes it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.environment import quiet_transformers, require_device
from flash_delta.cli.files import RUN


def generate(
    run: Annotated[Path, typer.Argument(help="The folder that `flash-delta train --out` wrote.", **RUN)],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    max_bytes: Annotated[int, typer.Option(help="Bytes to write.")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte every time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest bytes only.")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Continue a prompt through the decoding state: its size does not grow with the text."""
    from flash_delta.training import generate_text, load_model, require_checkpoint

    quiet_transformers()
    where = require_device(device)
    model = load_model(require_checkpoint(run)).to(where)
    text = generate_text(model, prompt, max_bytes, temperature=temperature, top_k=top_k, seed=seed)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write characters that the terminal's encoding lacks
    typer.echo(prompt.encode(errors="surrogateescape").decode(errors="replace"), nl=False)
    for piece in text:
        typer.echo(piece, nl=False)
    typer.echo()
