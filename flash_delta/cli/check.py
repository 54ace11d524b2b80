"""`flash-delta check`: every op and gradient against the float64 reference, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.checking import all_right, same_when_shared
from flash_delta.cli.files import PATH


def check(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="All named cases; on a GPU also full-size problems.")] = False,
    widths: Annotated[bool, typer.Option("--widths", help="All named cases with other widths of heads.")] = False,
    hard: Annotated[bool, typer.Option("--hard", help="The cases where keys repeat, in bfloat16.")] = False,
    case: Annotated[str | None, typer.Option(help="Only this case.")] = None,
    backend: Annotated[str | None, typer.Option(help="Check this backend; none: the one the library takes.")] = None,
    processes: Annotated[int, typer.Option(help="On a GPU: so many cases at a time.", min=1, max=64)] = 4,
    results: Annotated[Path | None, typer.Option("--json", help="Also write every error here.", **PATH)] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Only check processes that share a GPU.")] = False,
    rounds: Annotated[int | None, typer.Option(help="With --shared: calls of each kind; 500.", min=1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --json's file has that is right.")] = False,
) -> None:
    """Compare outputs and all gradients with the token-by-token recurrence in float64; exit code 1 if any is off.

    On a GPU the work runs in processes of its own, so that a crash costs one case. --full adds there what only shows at
    full size: 100 bitwise equal repeats, more than 1,024 blocks, tensors of more than 2^31 elements. --widths takes
    all named cases with K = 60, V = 100, whose rows are no multiples of 16 bytes, and with K = 24, V = 512. --hard, a
    part of --full, takes cases where keys repeat and rounding errors add up. They allow three times the error of
    rounding q and k alone, or a floor. --json has for each result its error, what is allowed, and that error.

    --shared calls training, prefill on pools and decoding in --processes side by side, with long work between calls.
    Every result has to have the bits that it has when its process works alone.
    """
    if shared:
        others = {"full": full, "widths": widths, "hard": hard, "case": case, "backend": backend}
        for name, value in (others | {"json": results, "resume": resume}).items():
            if value:
                raise ValueError(f"{name}: expected no such option beside --shared, got {value}")
        if not same_when_shared(device, processes, rounds or 500):
            raise typer.Exit(1)
        return
    if rounds is not None:
        raise ValueError(f"rounds: expected no number without --shared, got {rounds}")
    if not all_right(device, full, widths, hard, case, backend, processes, results, resume):
        raise typer.Exit(1)
