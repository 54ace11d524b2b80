"""`flash-delta prove`: small models learn what papers say that they can learn, and controls fail."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.environment import calm_threads, require_device
from flash_delta.cli.files import PATH, reading, require_writable
from flash_delta.cli.proving import chosen, print_verdicts, prove_each

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
    as soon as it is there, so short runs with --resume add up to a long one. The tasks: parity, sums (modulo 3),
    words-s3, recall, retold (keys that are told again), needle; and with --device cuda also words-a5, words-s5 and
    needle-long.
    """
    from flash_delta.proof import TASKS
    from flash_delta.proof.page import write_page
    from flash_delta.proof.results import read

    for name, given in (("tasks", tasks), ("seeds", seeds)):
        if quick and given:
            raise ValueError(f"{name}: expected none beside --quick, got {given}")
    where = require_device(device)
    todo = chosen(QUICK if quick else tasks, where)
    calm_threads(where, max(task.width for task in todo))
    file = out / "prove.json"
    done = []
    if resume:
        with reading("resume", file, "flash-delta prove"):
            done = read(file, TASKS, where)
    require_writable("out", file)
    results = prove_each(todo, 1 if quick else seeds or SEEDS, done, file, where)
    write_page(out / "prove.html", TASKS, results, where)
    if not print_verdicts(TASKS, results):
        raise typer.Exit(1)
