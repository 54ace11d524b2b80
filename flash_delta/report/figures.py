"""The pictures of a run as matplotlib figures. They depend only on numbers."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter
from torch import Tensor

from flash_delta.report.probe import Decay

WIDTH = 5.2  # inches: on a phone letters still have eight pixels
SMOOTHED = 30  # each mean of a curve is over 1 / SMOOTHED of its steps
CLIPPED = 0.99  # the share of a state's entries within the range of colours; stronger ones share the last colour
MOST_STATES = (4, 8)  # layers and heads in the picture of the states, since more would be too small to see


def loss_figure(steps: Sequence[dict], evaluations: Sequence[dict], entropy: float) -> Figure:
    """Bits per byte over steps: of training batches, their mean, held-out evaluations, and the order-0 entropy."""
    figure, axes = _figure(3.2)
    held_out = [(log["step"], log["eval_bits_per_byte"]) for log in evaluations]
    _curve(axes, steps, [log["bits_per_byte"] for log in steps], "training")
    axes.plot(*np.array(held_out).reshape(-1, 2).T, "o-", ms=4, color="C1", label="held out")
    axes.axhline(entropy, ls="--", lw=1, color="gray", label="order-0 entropy of the held-out text")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    return figure


def time_figure(steps: Sequence[dict], tokens: int) -> Figure:
    """Milliseconds of each step of so many tokens, and their mean."""
    figure, axes = _figure(2.4)
    _curve(axes, steps, step_ms(steps, tokens), "step")
    axes.set(xlabel="step", ylabel="ms", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(LogFormatter())  # labels also at minor ticks, if there are few
    axes.legend(frameon=False, fontsize="small")
    return figure


def step_ms(steps: Sequence[dict], tokens: int) -> list[float]:
    return [1e3 * tokens / log["tokens_per_second"] for log in steps]


def smoothed(values: Sequence[float]) -> tuple[int, np.ndarray]:
    """A moving average: the number n of values in each mean, and the means. The first is of the first n values."""
    span = max(1, len(values) // SMOOTHED)
    return span, np.convolve(values, np.full(span, 1 / span), mode="valid")


def scalar_decay_figure(decays: Sequence[Decay]) -> Figure:
    """Half-life of each head with one decay per token. The bar spans 10 % to 90 % of the tokens."""
    figure, axes = _figure(3.0)
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
    """Half-life of every key channel of each head, in one heat map per layer. Channels are sorted within a head."""
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

    The scale covers the share ``CLIPPED`` of the entries. Otherwise a few strong ones would leave the rest without
    colour.
    """
    layers = sorted(states)[: MOST_STATES[0]]
    columns = min(MOST_STATES[1], max(len(states[layer]) for layer in layers))
    figure = Figure(figsize=(WIDTH, 1.7 * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in zip(grid, layers, strict=True):
        strengths = states[layer].abs()
        bound = strengths.quantile(CLIPPED).item()
        for head, axes in enumerate(row):
            if head >= len(states[layer]):
                axes.axis("off")
                continue
            S = states[layer][head].numpy()  # [K, V]
            image = axes.imshow(S, cmap="RdBu_r", vmin=-bound, vmax=bound, interpolation="nearest")
            axes.set_title(f"head {head}", fontsize="small")
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"layer {layer}\nkey channel", fontsize="small")
        bar = figure.colorbar(image, ax=row, extend="both")
        bar.set_label(f"value of S\nstrongest {strengths.max():.3g}", fontsize="small")
        bar.ax.tick_params(labelsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("value channel", fontsize="small")
    return figure


def _curve(axes: Axes, logs: Sequence[dict], values: Sequence[float], name: str) -> None:
    """Draws each step's value in a pale colour, and over it the mean of the steps up to it."""
    steps, (span, means) = [log["step"] for log in logs], smoothed(values)
    axes.plot(steps, values, lw=0.8, alpha=0.45, color="C0", label=name)
    axes.plot(steps[span - 1 :], means, lw=1.8, color="C0", label=f"{name}, mean of {span} steps")


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
