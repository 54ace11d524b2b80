"""`flash-delta generate`: text from a trained run, as it is written."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.environment import quiet_transformers, require_device


def generate(
    run: Annotated[Path, typer.Argument(help="The folder that `flash-delta train --out` wrote.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    max_bytes: Annotated[int, typer.Option(help="Bytes to write.")] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte every time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest bytes only.")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Continue a prompt through the decoding state: its size does not grow with the text."""
    from flash_delta.models import FlashDeltaForCausalLM
    from flash_delta.training import generate_text, require_checkpoint

    quiet_transformers()
    model = FlashDeltaForCausalLM.from_pretrained(require_checkpoint(run)).to(require_device(device))
    typer.echo(prompt, nl=False)
    for piece in generate_text(model, prompt, max_bytes, temperature=temperature, top_k=top_k, seed=seed):
        typer.echo(piece, nl=False)
    typer.echo()
