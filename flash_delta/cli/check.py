"""`flash-delta check`: every op and gradient against the float64 reference, on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flash_delta.cli.checking import all_right, same_when_shared
from flash_delta.cli.environment import calm_threads, require_device
from flash_delta.cli.files import PATH
from flash_delta.cli.states import FEWEST, TOKENS, states_fit

WIDEST = 128  # the widest head of the small cases


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
    states: Annotated[
        str | None,
        typer.Option(help="Only look at the states of a model: a run, folder or name.", metavar="MODEL"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --states: what it reads; Python's own library.", **PATH)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help=f"With --states: so many tokens; {TOKENS:,}.", min=FEWEST)] = None,
) -> None:
    """Compare outputs and all gradients with the token-by-token recurrence in float64; exit code 1 if any is off.

    On a GPU the work runs in processes of its own, so that a crash costs one case. --full adds there what only shows at
    full size: 100 bitwise equal repeats, more than 1,024 blocks, tensors of more than 2^31 elements. --widths takes
    all named cases with K = 60, V = 100, whose rows are no multiples of 16 bytes, and with K = 24, V = 512. --hard, a
    part of --full, takes cases where keys repeat and rounding errors add up. They allow three times the error of
    rounding q and k alone, or a floor. --json has for each result its error, what is allowed, and that error.

    --shared calls training, prefill on pools and decoding in --processes side by side, with long work between calls.
    Every result has to have the bits that it has when its process works alone.

    --states lets a model read a text. For each of its layers with a recurrent state it prints how large the state gets,
    and the error of pools in float32, bfloat16 and float16: the state is rounded after every token, as decoding does.
    The error of int8 at rest is that of a float32 pool whose state was kept in int8 once, before these outputs.
    Exit code 1 if float16 does not hold a state, or if it costs more than bfloat16. --json gets these numbers.
    """
    cases = {"full": full, "widths": widths, "hard": hard, "case": case, "backend": backend, "resume": resume}
    if states is not None:
        _refuse("beside --states", cases | {"shared": shared, "rounds": rounds})
        right = states_fit(states, device, text, tokens or TOKENS, results)
    else:
        _refuse("without --states", {"text": text, "tokens": tokens})
        if shared:
            _refuse("beside --shared", cases | {"json": results})
            right = same_when_shared(device, processes, rounds or 500)
        else:
            _refuse("without --shared", {"rounds": rounds})
            if not (full or hard or case in _hard_cases()):  # all other cases are small
                calm_threads(require_device(device), WIDEST)
            right = all_right(device, full, widths, hard, case, backend, processes, results, resume)
    if not right:
        raise typer.Exit(1)


def _refuse(where: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}: expected no such option {where}, got {value}")


def _hard_cases() -> set[str]:
    from flash_delta.testing import HARD

    return {case.name for case in HARD}
