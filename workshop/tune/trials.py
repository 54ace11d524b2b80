"""Finds the fastest tile of a stage on this GPU, among those with right results, for ``flash-delta-dev tune``."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from flash_delta.compiler import target_of
from flash_delta.testing import Isolated, Lost, Refused, relative_error
from workshop.bench.timing import Run, Spread, milliseconds
from workshop.tune.stage import Stage

# The allowed relative L2 error of any output. A right stage in bfloat16 is off by a few roundings (2^-9 each). If a
# tile has a race or is miscompiled, the error is far larger.
LIMIT = 2e-2
WARM_UP, REPEATS = 5, 30


class Trial(NamedTuple):
    """The time of one tile, or the reason why it has none."""

    tile: Any
    ms: Spread | None = None
    error: float | None = None  # relative L2, of the worst output
    failure: str | None = None


class Tuner:
    """Inputs and truth of one stage, for as many tiles as wanted."""

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        time: Callable[[Run, torch.device, int], list[float]] = milliseconds,
    ):
        torch.manual_seed(0)
        self.stage, self.device, self.time = stage, device, time
        self.inputs = stage.make(device)
        self.want = stage.truth(self.inputs)

    def trial(self, tile: Any) -> Trial:
        """Times one tile. Errors of the compiler or of the launch are raised."""
        with _fresh_memory_is_nan():
            got = self.stage.launch(self.inputs, tile)
        name, error = max(
            ((name, relative_error(got[name], want)) for name, want in self.want.items()), key=lambda named: named[1]
        )
        if error > LIMIT:
            return Trial(tile, error=error, failure=f"{name} is off by {error:.1e}, {LIMIT:.0e} is allowed")

        def run() -> None:
            self.stage.launch(self.inputs, tile)

        self.time(run, self.device, WARM_UP)
        return Trial(tile, Spread.of(self.time(run, self.device, REPEATS)), error)


def load(module: str, stage: str, device: torch.device) -> Tuner:
    """Makes the tuner of a stage. It is called in a process of its own."""
    return Tuner(importlib.import_module(module).STAGES[stage], device)


def trials(module: str, stage: str, tiles: list[Any], device: torch.device, timeout_s: float) -> Iterator[Trial]:
    """Yields a trial for each tile. A tile that does not compile, crashes or hangs does not affect the others."""
    tuner = Isolated(partial(load, module, stage, device), timeout_s)
    try:
        for tile in tiles:
            try:
                yield tuner.call("trial", tile)
            except (Refused, Lost) as error:
                yield Trial(tile, failure=str(error))
    finally:
        tuner.stop()


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The trials, fastest first. Trials without a time come last."""
    return sorted(trials, key=lambda trial: (trial.ms is None, trial.ms.median if trial.ms else 0.0))


def row(sizes: tuple[int, ...], trials: list[Trial], target: str, gpu: str) -> str | None:
    """A line for a table of tiles: the best of the ranked trials, and how far the next is."""
    timed = [trial for trial in trials if trial.ms is not None]
    if not timed:
        return None
    best, *others = timed
    key = ", ".join([f'"{target}"', *map(str, sizes)])
    line = f"({key}): {best.tile},  # {gpu}: {best.ms.median:.3g} ms"
    if others:
        line += f"; next {others[0].ms.median:.3g} at {_difference(others[0].tile, best.tile)}"
    return line


def _difference(tile: Any, best: Any) -> str:
    fields = tile._asdict()
    return ", ".join(f"{name}={value}" for name, value in fields.items() if value != getattr(best, name))


def target_and_name(device: torch.device) -> tuple[str, str]:
    return target_of(device), torch.cuda.get_device_name(device)


@contextmanager
def _fresh_memory_is_nan():
    """Fills new memory with NaN. So a number that a tile forgets to write is an error, not an earlier tile's number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
