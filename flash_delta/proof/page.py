"""One self-contained HTML page about what models learnt: a plot and a table for each task."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

import flash_delta
from flash_delta.page import Picture, picture, render
from flash_delta.proof.results import Result, Verdict, verdicts
from flash_delta.proof.task import Paper, Task
from flash_delta.testing.machine import machine


class Part(NamedTuple):
    """One task on the page."""

    picture: Picture
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    papers: Sequence[Paper]


def write_page(path: Path, tasks: Sequence[Task], results: Sequence[Result], device: torch.device) -> None:
    """Writes the page about these results. It loads nothing from elsewhere."""
    judged = [(task, list(verdicts(task, results))) for task in tasks]
    everything = [verdict for _, found in judged for verdict in found if verdict.bound is not None]
    page = render(
        "proof.html.j2",
        title="flash_delta: proof by learning",
        numbers=[
            ("bounds that hold", f"{sum(v.holds for v in everything)} of {len(everything)}", ""),
            ("models trained", str(len(results)), ""),
            ("training", f"{sum(result.seconds for result in results):,.0f}", "s"),
        ],
        facts=[
            ("software", f"flash_delta {flash_delta.__version__}"),
            *machine(device).items(),
            ("backends", ", ".join(sorted({result.backend for result in results}))),
        ],
        parts=[_part(task, found) for task, found in judged if found],
    )
    path.write_text(page, encoding="utf-8")


def _part(task: Task, found: list[Verdict]) -> Part:
    rows = [
        (
            f"{verdict.learner.name}{' (control)' if verdict.learner.control else ''}",
            f"{verdict.size}",
            ", ".join(f"{accuracy:.3f}" for accuracy in verdict.accuracies),
            "" if verdict.bound is None else str(verdict.bound),
            "holds" if verdict.holds else "broken",
        )
        for verdict in found
    ]
    seeds = max(len(verdict.accuracies) for verdict in found)
    reading = (
        f"Accuracy on new strings, by {task.unit}. A line is the mean of all seeds ({seeds}), its shade spans them. "
        f"Controls are dashed. Training ends at {task.trained} (the grey line). Dotted: chance, {task.chance:.2f}."
    )
    shown = picture(task.title, reading, lambda: accuracy_figure(task, found))
    return Part(shown, ("model", task.unit, "accuracy of each seed", "bound", "verdict"), rows, task.papers)


def accuracy_figure(task: Task, found: Sequence[Verdict]) -> Figure:
    """Accuracy over size: a line for each model, and chance."""
    figure = Figure(figsize=(6.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    for learner in task.learners:
        mine = [verdict for verdict in found if verdict.learner is learner]
        if mine:
            sizes, seeds = [v.size for v in mine], [v.accuracies for v in mine]
            style = "s--" if learner.control else "o-"
            (line,) = axes.plot(sizes, [sum(a) / len(a) for a in seeds], style, ms=4, label=learner.name)
            axes.fill_between(sizes, [*map(min, seeds)], [*map(max, seeds)], color=line.get_color(), alpha=0.2, lw=0)
    axes.axhline(task.chance, ls=":", lw=1.2, color="gray", label="chance")
    axes.axvline(task.trained, lw=1, color="gray", label="longest in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks(task.sizes, [str(size) for size in task.sizes])
    axes.set(xlabel=task.unit, ylabel="accuracy", ylim=(0, 1.04))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure
