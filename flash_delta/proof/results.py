"""What `flash-delta prove` measured: one result for each model and seed, as JSON, and the judgement."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flash_delta
from flash_delta.proof.task import Bound, Learner, Task
from flash_delta.testing.machine import machine


@dataclass(frozen=True)
class Result:
    """One model of a task, trained from one seed."""

    task: str
    learner: str
    seed: int
    backend: str  # that ran its ops with gradients; "none" without such ops
    loss: float  # of the last batch in training
    seconds: float  # of training
    accuracy: dict[int, float]  # by the size of the test strings


class Verdict(NamedTuple):
    """All seeds of one model at one size."""

    learner: Learner
    size: int
    accuracies: tuple[float, ...]  # a number for each seed
    bound: Bound | None  # None: measured, but nothing is promised

    @property
    def nearest(self) -> float:
        """The accuracy of the seed that is nearest to breaking the bound: of a control the highest, or else the
        least."""
        return max(self.accuracies) if self.learner.control else min(self.accuracies)

    @property
    def holds(self) -> bool:
        """Whether every seed keeps the bound."""
        return self.bound is None or all(map(self.bound.holds, self.accuracies))


def verdicts(task: Task, results: Sequence[Result]) -> Iterator[Verdict]:
    """Judges the results of a task, for each model and size."""
    for learner in task.learners:
        mine = [result for result in results if (result.task, result.learner) == (task.name, learner.name)]
        for size in task.sizes:
            if mine:
                accuracies = tuple(result.accuracy[size] for result in mine)
                yield Verdict(learner, size, accuracies, learner.bounds.get(size))


def write(path: Path, tasks: Sequence[Task], results: Sequence[Result], device: torch.device) -> None:
    """Writes the machine, versions, every result, and the bounds of its model."""
    bounds = {
        (task.name, learner.name): {size: asdict(bound) for size, bound in learner.bounds.items()}
        for task in tasks
        for learner in task.learners
    }
    lines = [asdict(result) | {"bounds": bounds[result.task, result.learner]} for result in results]
    found = _head(device) | {"tasks": {task.name: task.settings for task in tasks}, "results": lines}
    part = path.with_suffix(".part")  # so that a command that is killed leaves the whole file of before
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path, tasks: Sequence[Task], device: torch.device) -> list[Result]:
    """The results in a file that ``write`` made with this version, of these tasks, on such a machine.

    Raises:
        ValueError: if there is no file, or one of another version, of other tasks or of another machine.
    """
    if not path.exists():
        raise ValueError(f"resume: expected {path} to continue, got no such file")
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in _head(device).items():
        if found[name] != value:
            raise ValueError(f"resume: expected results with {name} {value}, got {found[name]} in {path}")
    results = [_result(line) for line in found["results"]]
    today = {(task.name, learner.name): task.settings for task in tasks for learner in task.learners}
    for result in results:
        if today.get((result.task, result.learner)) != found["tasks"][result.task]:
            told = f"{result.task}, {result.learner}, {found['tasks'][result.task]}"
            raise ValueError(f"resume: expected models and settings of today's tasks, got {told} in {path}")
    return results


def _head(device: torch.device) -> dict[str, Any]:
    return {"flash_delta": flash_delta.__version__, "device": device.type, "machine": machine(device)}


def _result(line: dict[str, Any]) -> Result:
    accuracy = {int(size): right for size, right in line["accuracy"].items()}
    return Result(**{name: value for name, value in line.items() if name != "bounds"} | {"accuracy": accuracy})
