"""`flash-delta prove`: small models learn what papers say that they can learn, and controls fail."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flash_delta.cli.environment import calm_threads, require_device
from flash_delta.cli.files import PATH, reading, require_writable
from flash_delta.cli.tables import Table, show

if TYPE_CHECKING:
    import torch

    from flash_delta.proof.results import Result, Verdict
    from flash_delta.proof.task import Task

QUICK = ("parity", "words-s3")
SEEDS = 3


def prove(
    tasks: Annotated[list[str] | None, typer.Argument(help="Names of tasks; none: all that suit the device.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for prove.json and prove.html.", **PATH)] = Path("runs/prove"),
    seeds: Annotated[int | None, typer.Option(help=f"Seeds of each model; {SEEDS}.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {' and '.join(QUICK)}, with one seed.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the models that prove.json has.")] = False,
) -> None:
    """Train small models on tasks with a known answer, and judge their accuracy; exit code 1 if a bound is broken.

    A model has to reach its bound from every seed. A control has to stay below its own. prove.json gets every result
    as soon as it is there, so short runs with --resume add up to a long one. All results in it are judged and shown.

    The tasks: parity, sums (modulo 3), words-s3 (products of permutations), recall, retold (keys that are told again),
    needle. With --device cuda also words-a5, words-s5 and needle-long.
    """
    from flash_delta.proof import TASKS
    from flash_delta.proof.page import write_page
    from flash_delta.proof.results import read

    for name, given in (("tasks", tasks), ("seeds", seeds)):
        if quick and given:
            raise ValueError(f"{name}: expected none beside --quick, got {given}")
    where, file = require_device(device), out / "prove.json"
    todo = _chosen(QUICK if quick else tasks, where)
    calm_threads(where, max(task.width for task in todo))
    done = []
    if resume:
        with reading("resume", file, "flash-delta prove"):
            done = read(file, TASKS, where)
    require_writable("out", file)
    results = _prove_each(todo, 1 if quick else seeds or SEEDS, done, file, where)
    write_page(out / "prove.html", TASKS, results, where)
    if not _print_verdicts(TASKS, results):
        raise typer.Exit(1)


def _chosen(names: Iterable[str] | None, device: "torch.device") -> "list[Task]":
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


def _prove_each(
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
                said = f"{task.name}, {learner.name}, seed {seed}: {_by_size(result.accuracy)}"
                typer.echo(f"{said} ({result.seconds:.0f} s)", err=True)
    return results


def _by_size(accuracy: dict[int, float]) -> str:
    return ", ".join(f"{right:.2f} at {size}" for size, right in accuracy.items())


def _print_verdicts(tasks: "Sequence[Task]", results: "Sequence[Result]") -> bool:
    """Prints a table for each task that has results, and returns whether all bounds hold."""
    from flash_delta.proof.results import verdicts

    judged = [(task, list(verdicts(task, results))) for task in tasks]
    show([_table(task, mine) for task, mine in judged if mine])
    print()
    bounds = [(task, verdict) for task, mine in judged for verdict in mine if verdict.bound is not None]
    for task, verdict in bounds:
        if not verdict.holds:
            got = ", ".join(f"{accuracy:.3f}" for accuracy in verdict.accuracies)
            expected = f"expected {verdict.bound} at {verdict.size} from every seed"
            print(f"{task.name}, {verdict.learner.name}: {expected}, got {got}")
    held = sum(verdict.holds for _, verdict in bounds)
    print(f"{held} of {len(bounds)} bounds hold")
    return held == len(bounds)


def _table(task: "Task", judged: "list[Verdict]") -> Table:
    """A row for each model: beside each accuracy its bound, and whether all of them hold."""
    rows = []
    for learner in task.learners:
        mine = [verdict for verdict in judged if verdict.learner is learner]
        if mine:
            cells = (f"{v.nearest:.2f}" if v.bound is None else f"{v.nearest:.2f} {v.bound}" for v in mine)
            held = "holds" if all(verdict.holds for verdict in mine) else "broken"
            rows.append((learner.name, str(len(mine[0].accuracies)), *cells, held))
    title = f"{task.name}: accuracy by {task.unit}, from the seed that is nearest to breaking the bound; chance is"
    head = ("model", "seeds", *map(str, task.sizes), "verdict")
    return Table(head, rows, f"{title} {task.chance:.2f}")
