"""The pictures of a benchmark's page, as matplotlib figures: pure functions of results."""

from collections.abc import Callable
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workshop.bench.results import Group, Result
from workshop.bench.tables import OURS, contestants

WIDTH = 5.2  # inches: on a phone letters still have eight pixels
PANELS = 2  # side by side
LETTERS = 24  # of a row's name in a line


def times_figure(group: Group) -> Figure:
    """Milliseconds of every contestant on every row. A tick marks the hardware's floor."""
    figure, axes = _dots(group, lambda r: r.ms and r.ms.median, "ms: left is faster")
    for y, results in enumerate(group.rows().values()):
        if results[0].floor_ms:
            axes.plot(results[0].floor_ms, y, "|", color="gray", ms=12, mew=2, label="floor" if y == 0 else None)
    _legend(figure, axes)
    return figure


def floor_figure(group: Group) -> Figure:
    """Times divided by the floor. They show how much of the hardware each contestant leaves unused."""
    figure, axes = _dots(group, lambda r: r.ms and r.floor_ms and r.ms.median / r.floor_ms, "times the floor")
    axes.axvline(1, color="gray", lw=1)
    _legend(figure, axes)
    return figure


def first_call_figure(group: Group) -> Figure:
    """Seconds of each row's first call, in one process and in this order. Only the top row has empty caches."""
    figure, axes = _dots(group, lambda r: r.first_call_s if r.ms else None, "first call, s")
    _legend(figure, axes)
    return figure


def scaling_figure(group: Group) -> Figure | None:
    """Time over tokens in one sequence (decoding: over sequences), a panel for each number of heads."""
    panels: dict[str, list[Result]] = {}
    for result in group.results:
        w = result.workload
        sized = result.ms and not w.form and w.kind != "prefill"
        if sized and (w.N == 1 or w.kind == "decode") and (w.T > 1) == (w.kind != "decode"):
            name = f"{w.kind}, {w.H}/{w.HV} heads" + ("" if w.dtype == "bfloat16" else f", {w.dtype}")
            name += "" if w.state_dtype == "float32" else f", {w.state_dtype} states"
            panels.setdefault(name, []).append(result)
    panels = {name: rs for name, rs in panels.items() if len({r.workload.N * r.workload.T for r in rs}) > 1}
    if not panels:
        return None
    height = -(-len(panels) // PANELS)
    figure = Figure(figsize=(WIDTH, 0.5 + 2.4 * height), layout="constrained")
    grid = figure.subplots(height, PANELS, squeeze=False).flatten()
    for axes, (name, results) in zip(grid, panels.items(), strict=False):
        for contestant in contestants(group):
            points = sorted((r.workload.N * r.workload.T, r.ms.median) for r in results if r.contestant == contestant)
            axes.plot(*zip(*points, strict=True), "o-", ms=4, **_style(group, contestant)) if points else None
        decoding = results[0].workload.kind == "decode"
        axes.set(xscale="log", yscale="log", ylabel="ms", xlabel="sequences" if decoding else "tokens")
        axes.set_title(name, fontsize="small")
        sizes = sorted({r.workload.N * r.workload.T for r in results})
        axes.minorticks_off()
        _plain(axes)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    for axes in grid[len(panels) :]:
        axes.axis("off")
    _legend(figure, grid[0])
    return figure


def _dots(group: Group, value: Callable[[Result], float | None], xlabel: str) -> tuple[Figure, Axes]:
    rows = group.rows()
    figure = Figure(figsize=(WIDTH, 1.2 + 0.33 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for name in contestants(group):
        points = [(value(r), y) for y, rs in enumerate(rows.values()) for r in rs if r.contestant == name]
        shown = [(x, y) for x, y in points if x]
        if shown:
            style = _style(group, name)
            axes.plot(*zip(*shown, strict=True), "o", ms=8 if name == OURS else 6, **style)
    axes.set(xscale="log", xlabel=xlabel)
    axes.set_yticks(range(len(rows)), [fill(row, LETTERS) for row in rows], fontsize="small")
    axes.invert_yaxis()
    _plain(axes)
    return figure, axes


def _style(group: Group, name: str) -> dict[str, str]:
    """A colour per contestant, the same in every picture."""
    colors = {other: f"C{i}" for i, other in enumerate(group.versions)}
    return {"color": colors[name], "label": name}


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize="small")
