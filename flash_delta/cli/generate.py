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
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-bytes", help="Tokens to write.", min=0, max=10**9)
    ] = 400,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens only.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing.", min=0, max=2**63 - 1)] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Continue a prompt through the decoding state: its size does not grow with the text."""
    from transformers import TextStreamer

    from flash_delta.training import generate_text, load_model, load_tokenizer, require_checkpoint

    quiet_transformers()
    where, checkpoint = require_device(device), require_checkpoint(run)
    model, tokenizer = load_model(checkpoint).to(where), load_tokenizer(str(checkpoint))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write characters that the terminal's encoding lacks
    drawn = {"temperature": temperature, "top_k": top_k, "seed": seed}
    generate_text(model, tokenizer, prompt, max_tokens, streamer=TextStreamer(tokenizer), **drawn)
