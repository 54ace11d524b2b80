"""What negative eigenvalues are for: the parity of a string of bits, at every prefix.

    python examples/state_tracking.py --out state_tracking.svg

A state whose eigenvalues are in (0, 1) can only fade. With ``allow_neg_eigval`` beta goes up to 2, and a token may turn
the state's sign: one layer then counts bits modulo two. Both models have one Gated DeltaNet layer, see the same random
strings of 40 bits, and are tested on strings of 512. Takes some 20 seconds on two cores.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flash_delta.layers import GatedDeltaNet

LENGTHS = (10, 20, 40, 64, 96, 128, 192, 256, 512)  # where accuracy is shown
TRAINED, WINDOW = 40, 8  # bits of a string in training; positions that a length's accuracy is the mean of


class Parity(nn.Module):
    def __init__(self, allow_neg_eigval: bool, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(2, width)
        self.norm = nn.RMSNorm(width)
        self.mixer = GatedDeltaNet(
            width, expand_v=1, head_dim=16, num_heads=2, use_short_conv=False, allow_neg_eigval=allow_neg_eigval
        )
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2))

    def forward(self, bits: Tensor) -> Tensor:
        """Logits ``[B, T, 2]`` of the parity of each prefix of ``bits [B, T]``."""
        x = self.embedding(bits)
        return self.head(x + self.mixer(self.norm(x)))


def train(allow_neg_eigval: bool, steps: int, seed: int) -> Parity:
    torch.manual_seed(seed)
    model = Parity(allow_neg_eigval)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0)
    for _ in range(steps):
        bits = torch.randint(2, (32, TRAINED))
        loss = cross_entropy(model(bits).flatten(0, 1), (bits.cumsum(1) % 2).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def accuracies(model: Parity, strings: int = 512) -> list[float]:
    """At each of LENGTHS: the mean over the last WINDOW prefixes up to that length."""
    bits = torch.randint(2, (strings, LENGTHS[-1]))
    right = (model(bits).argmax(-1) == bits.cumsum(1) % 2).float()
    return [right[:, length - WINDOW : length].mean().item() for length in LENGTHS]


def draw(results: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, values in results.items():
        axes.plot(LENGTHS, values, "o-", ms=4, label=name)
    axes.axvline(TRAINED, ls="--", lw=1, color="gray", label="longest string in training")
    axes.axhline(0.5, ls=":", lw=1, color="gray", label="chance")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set(xlabel="bits", ylabel="accuracy of their parity", ylim=(0.4, 1.02))
    axes.legend(frameon=False)
    return figure


def main(
    out: Annotated[Path | None, typer.Option(help="Where to draw accuracy over length (.svg, .png).")] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 200,
    seed: Annotated[int, typer.Option(help="Of both models and of the strings.")] = 0,
) -> None:
    """Train a layer with and without negative eigenvalues to tell the parity of bits."""
    results = {}
    for name, allowed in (("with negative eigenvalues", True), ("without", False)):
        model = train(allowed, steps, seed)
        results[name] = accuracies(model)
    table = Table("accuracy at length", *map(str, LENGTHS))
    for name, values in results.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    Console(width=110).print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(results).savefig(out)
        print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
