"""The work of `flash-delta prove`: choose tasks, train one model after the other, and print what bounds say."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flash_delta.cli.tables import Table, show

if TYPE_CHECKING:
    import torch

    from flash_delta.proof.results import Result, Verdict
    from flash_delta.proof.task import Task


def chosen(names: Iterable[str] | None, device: "torch.device") -> "list[Task]":
    """The tasks of these names, or all that this kind of device can learn in minutes."""
    from flash_delta.proof import TASKS

    known = {task.name: task for task in TASKS}
    suits = [name for name, task in known.items() if task.device in ("cpu", device.type)]
    for name in names or ():
        if name not in known:
            raise ValueError(f"tasks: expected some of {', '.join(known)}, got {name!r}")
        if name not in suits:
            raise ValueError(f"tasks: expected some of {', '.join(suits)} on {device}, got {name!r}, which needs a GPU")
    return [known[name] for name in names or suits]


def prove_each(
    tasks: "Sequence[Task]", seeds: int, done: "list[Result]", file: Path, device: "torch.device"
) -> "list[Result]":
    """Trains every model that is not done yet, from each seed. Writes the file first, and after each of them."""
    from flash_delta.proof import TASKS
    from flash_delta.proof.learning import prove
    from flash_delta.proof.results import write

    results, have = list(done), {(result.task, result.learner, result.seed) for result in done}
    write(file, TASKS, results, device)
    for task in tasks:
        for learner, seed in product(task.learners, range(seeds)):
            if (task.name, learner.name, seed) not in have:
                result = prove(task, learner, seed, device)
                results.append(result)
                write(file, TASKS, results, device)
                said = f"{task.name}, {learner.name}, seed {seed}: {by_size(result.accuracy)} ({result.seconds:.0f} s)"
                typer.echo(said, err=True)
    return results


def by_size(accuracy: dict[int, float]) -> str:
    return ", ".join(f"{right:.2f} at {size}" for size, right in accuracy.items())


def print_verdicts(tasks: "Sequence[Task]", results: "Sequence[Result]") -> bool:
    """Prints a row for each model, and returns whether all bounds hold."""
    from flash_delta.proof.results import verdicts

    rows, broken = [], []
    for task in tasks:
        judged = list(verdicts(task, results))
        for learner in task.learners:
            mine = [verdict for verdict in judged if verdict.learner is learner]
            if mine:
                rows.append((task.name, learner.name, *_row(mine), f"{task.chance:.2f}"))
            broken += [f"{task.name}, {learner.name}: {_broken(v)}" for v in mine if not v.holds]
    head = ("task", "model", "seeds", "accuracy at size", "bound", "verdict", "chance")
    show([Table(head, rows, "accuracy of the seed that is nearest to the bound, or beyond it")])
    print("\n".join(broken) or f"all bounds of {len(rows)} models hold")
    return not broken


def _row(judged: "list[Verdict]") -> tuple[str, ...]:
    """Of one model: its seeds, its accuracy at each size, its bounds, and whether they hold."""
    bounds: dict[str, list[str]] = {}
    for verdict in judged:
        if verdict.bound is not None:
            bounds.setdefault(str(verdict.bound), []).append(str(verdict.size))
    promised = "; ".join(f"{bound} at {', '.join(sizes)}" for bound, sizes in bounds.items())
    measured = by_size({verdict.size: verdict.nearest for verdict in judged})
    held = "holds" if all(verdict.holds for verdict in judged) else "broken"
    return str(len(judged[0].accuracies)), measured, promised, held


def _broken(verdict: "Verdict") -> str:
    got = ", ".join(f"{accuracy:.3f}" for accuracy in verdict.accuracies)
    return f"expected {verdict.bound} at {verdict.size}, got {got} from the seeds"
