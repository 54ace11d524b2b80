"""`flash-delta-dev check`: other libraries on the cases of `flash-delta check`, beside this library."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.checking import all_right
from flash_delta.cli.files import PATH


def check(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="All named cases; on a GPU also full-size problems.")] = False,
    widths: Annotated[bool, typer.Option("--widths", help="All named cases with other widths of heads.")] = False,
    hard: Annotated[bool, typer.Option("--hard", help="The cases where keys repeat, in bfloat16.")] = False,
    case: Annotated[str | None, typer.Option(help="Only this case.")] = None,
    backend: Annotated[str | None, typer.Option(help="Check this backend; none: the one the library takes.")] = None,
    peers: Annotated[str, typer.Option(help="Comma-separated peers, or 'all' that are installed.")] = "all",
    processes: Annotated[int, typer.Option(help="On a GPU: so many cases at a time.", min=1, max=64)] = 4,
    results: Annotated[Path | None, typer.Option("--json", help="Also write every error here.", **PATH)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --json's file has that is right.")] = False,
) -> None:
    """Judge peers as `flash-delta check` judges this library; exit code 1 if any result of this library is off.

    A peer runs the cases that its op has arguments for, in float32 and bfloat16, in a process of its own.
    """
    from workshop.bench import Peer, versions
    from workshop.bench.contestants import OURS

    judged = {name: partial(Peer, name) for name in versions(None if peers == "all" else peers) if name != OURS}
    if not all_right(device, full, widths, hard, case, backend, processes, results, resume, judged):
        raise typer.Exit(1)
