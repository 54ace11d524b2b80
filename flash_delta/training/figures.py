"""The pictures of a run, as matplotlib figures: pure functions of numbers, saved by the trainer and the report."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from flash_delta.training.probe import Decay

WIDTH = 8.0  # inches
MOST_STATES = (4, 8)  # layers and heads that the picture of the states shows: more would be too small to see


def loss_figure(records: Sequence[dict], entropy: float) -> Figure:
    """Bits per byte over steps: every training batch, every held-out evaluation, and the order-0 entropy."""
    figure, axes = _figure(3.6)
    held_out = [(r["step"], r["held_out_bits_per_byte"]) for r in records if r["held_out_bits_per_byte"] is not None]
    axes.plot([r["step"] for r in records], [r["bits_per_byte"] for r in records], lw=0.8, alpha=0.6, label="training")
    axes.plot(*np.array(held_out).reshape(-1, 2).T, "o-", ms=4, label="held out")
    axes.axhline(entropy, ls="--", lw=1, color="gray", label="order-0 entropy of the held-out text")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def scalar_decay_figure(decays: Sequence[Decay]) -> Figure:
    """Half-life of each head with one decay per token; the bar spans 10 % to 90 % of the tokens."""
    figure, axes = _figure(3.4)
    for x, decay in enumerate(decays):
        heads = len(decay.half_life)
        xs = x + (np.arange(heads) - (heads - 1) / 2) * 0.8 / heads
        axes.vlines(xs, *decay.token_range.numpy(), color="C0", lw=2, alpha=0.4)
        axes.plot(xs, decay.half_life.numpy(), "o", color="C0", ms=5)
    axes.set_yscale("log")
    axes.set(ylabel="half-life, tokens")
    axes.set_xticks(range(len(decays)), [f"layer {decay.layer}" for decay in decays])
    axes.set_xlabel("layer, its heads from left to right")
    return figure


def channel_decay_figure(decays: Sequence[Decay]) -> Figure:
    """Half-life of every key channel of each head, one heat map per layer, the channels sorted within a head."""
    low, high = min(d.half_life.min().item() for d in decays), max(d.half_life.max().item() for d in decays)
    figure = Figure(figsize=(WIDTH, 1.0 + 1.5 * len(decays)), layout="constrained")
    for axes, decay in zip(figure.subplots(len(decays), 1, squeeze=False)[:, 0], decays, strict=True):
        channels = decay.half_life.sort(dim=-1).values.numpy()
        image = axes.imshow(channels, norm=LogNorm(low, high), aspect="auto", interpolation="nearest")
        axes.set(title=f"layer {decay.layer}", xlabel="key channel, sorted by half-life", ylabel="head")
        axes.set_yticks(range(len(decay.half_life)))
    figure.colorbar(image, ax=figure.axes, label="half-life, tokens")
    return figure


def states_figure(states: dict[int, Tensor]) -> Figure:
    """The recurrent states S [K, V] of the first layers and heads, each layer on its own symmetric scale.

    The scale ends at the 99th percentile: single strong entries would leave the rest without colour.
    """
    layers = sorted(states)[: MOST_STATES[0]]
    columns = min(MOST_STATES[1], max(len(states[layer]) for layer in layers))
    figure = Figure(figsize=(WIDTH, 2.1 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in zip(grid, layers, strict=True):
        bound = states[layer].abs().quantile(0.99).item()
        for head, axes in enumerate(row):
            if head >= len(states[layer]):
                axes.axis("off")
                continue
            S = states[layer][head].numpy()  # [K, V]
            image = axes.imshow(S, cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
            axes.set_title(f"layer {layer}, head {head}", fontsize="small")
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel("key channel")
        figure.colorbar(image, ax=row, label="value of S", extend="both")
    for axes in grid[-1]:
        axes.set_xlabel("value channel")
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
