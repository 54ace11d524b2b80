"""`flash-delta-dev tune`: the fastest tile of a stage on this GPU, as a line for its table of tiles."""

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_delta.cli.environment import require_device
from flash_delta.cli.files import PATH, require_writable
from workshop.cli.modules import require_modules

if TYPE_CHECKING:
    from workshop.tune.trials import Trial

STAGES = "workshop.tune.stages"
TIMEOUT_S = 300.0  # for one tile, with its compilation


def tune(
    stage: Annotated[str, typer.Argument(help="Name of a stage, e.g. scan.")],
    module: Annotated[str | None, typer.Option(help="A module with its own STAGES; none: the library's.")] = None,
    device: Annotated[str, typer.Option(help="A GPU.")] = "cuda",
    results: Annotated[Path | None, typer.Option("--json", help="Also write every tile's time here.", **PATH)] = None,
) -> None:
    """Time every tile that may fit, best first, and print the line to paste. A tile with a wrong result gets no time.

    Tiles run in a process of their own: one that does not compile, or crashes, costs its own row.
    """
    from workshop.tune.trials import ranked, row, target_and_name, trials

    where = require_device(device)
    if where.type != "cuda":
        raise ValueError(f"device: expected a GPU, got {device!r}")
    name = STAGES if module is None else module
    require_modules([name])
    stages = vars(importlib.import_module(name)).get("STAGES", {})
    if stage not in stages:
        known = f"one of {', '.join(stages)}" if stages else f"a module with STAGES, which {name} has not"
        raise ValueError(f"stage: expected {known}, got {stage!r}")
    if results is not None:
        require_writable("json", results)
    target, gpu = target_and_name(where)
    tiles = stages[stage].tiles(target)
    console = Console()
    found = list(track(trials(name, stage, tiles, where, TIMEOUT_S), stage, total=len(tiles), console=console,
                       transient=True, disable=not console.is_terminal))  # fmt: skip
    best_first = ranked(found)
    console.print(_table(best_first, f"{stage} on {gpu}, {target}"))
    line = row(stages[stage].sizes, best_first, target, gpu)
    console.print(line or "no tile is right", soft_wrap=True, markup=False, highlight=False)
    if results is not None:
        _write(results, stage, target, gpu, best_first)
    if line is None:
        raise typer.Exit(1)


def _table(trials: "list[Trial]", title: str) -> Table:
    table = Table("tile", title=title)
    for column in ("ms", "p10-p90", "error"):
        table.add_column(column, justify="right")
    table.add_column("remarks")
    for trial in trials:
        ms, error = trial.ms, "" if trial.error is None else f"{trial.error:.0e}"
        times = (f"{ms.median:.4f}", f"{ms.low:.4f}-{ms.high:.4f}") if ms else ("", "")
        table.add_row(str(trial.tile), *times, error, trial.failure or "")
    return table


def _write(path: Path, stage: str, target: str, gpu: str, trials: "list[Trial]") -> None:
    """Writes one line of JSON per tile."""
    lines = (
        json.dumps({"tile": t.tile._asdict(), "ms": t.ms and t.ms._asdict(), "error": t.error, "failure": t.failure})
        for t in trials
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"stage": stage, "target": target, "gpu": gpu})[1:-1]
    rows = ",\n  ".join(lines)
    path.write_text(f'{{{head},\n "tiles": [\n  {rows}\n]}}\n')
