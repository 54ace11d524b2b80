"""`flash-delta check`: every op and gradient against the float64 reference, on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_delta.cli.environment import require_device
from flash_delta.cli.files import PATH, reading, require_writable

if TYPE_CHECKING:
    import torch

    from flash_delta.bench.judging import Answer, Job

COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dp", "dinitial_state", "dA_log", "ddt_bias")
DTYPES = ("float64", "float32", "bfloat16")


def check(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="All named cases; on a GPU also full-size problems.")] = False,
    case: Annotated[str | None, typer.Option(help="Only this case.")] = None,
    backend: Annotated[str | None, typer.Option(help="Check this backend; none: the one the library takes.")] = None,
    peers: Annotated[str | None, typer.Option(help="Comma-separated peers to judge beside it, or 'all'.")] = None,
    processes: Annotated[int, typer.Option(help="On a GPU: so many cases at a time.", min=1, max=64)] = 4,
    results: Annotated[Path | None, typer.Option("--json", help="Also write every error here.", **PATH)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --json's file has that is right.")] = False,
) -> None:
    """Compare outputs and all gradients with the token-by-token recurrence in float64; exit code 1 if any is off.

    On a GPU the work runs in processes of its own, so that a crash costs one case. --full adds there what only shows at
    full size: 100 bitwise equal repeats, more than 1,024 blocks, tensors of more than 2^31 elements.
    """
    from flash_delta.bench.judging import judge, names_of, read, write

    where = require_device(device)
    console = Console()
    console = Console(width=max(console.width, 130)) if not console.is_terminal else console
    jobs = list(_jobs(full, case, where))
    order = {names_of(job): number for number, job in enumerate(jobs)}
    answers = []
    if resume:
        with reading("json", results, "flash-delta check"):
            answers = read(results, where)
    if results is not None:
        require_writable("json", results)
    done = {answer.names for answer in answers}
    jobs = [job for job in jobs if names_of(job) not in done]
    for answer in track(judge(jobs, where, backend, peers, processes), "checking", total=len(jobs), console=console,
                        transient=True, disable=not console.is_terminal):  # fmt: skip
        answers.append(answer)
        answers.sort(key=lambda answer: order.get(answer.names, len(order)))
        if results is not None:
            write(results, answers, where)
    console.print(_table(answers, str(where)))
    for answer in answers:
        _print_wrong(console, answer)
    cells = [cell for answer in answers for cell in answer.cells]
    console.print(f"{sum(cell.right for cell in cells):,} of {len(cells):,} tensors are right")
    if not all(answer.right for answer in answers):
        raise typer.Exit(1)


def _jobs(full: bool, only: str | None, device: "torch.device") -> "Iterator[Job]":
    from flash_delta.testing import CASES, MEMBERS
    from flash_delta.testing.matrix import STRESS

    cases = [case for case in CASES if (full or case.smoke if only is None else case.name == only)]
    if not cases:
        raise ValueError(f"case: expected one of {', '.join(case.name for case in CASES)}, got {only!r}")
    for name, member in MEMBERS.items():
        for dtype in DTYPES:
            yield from (("case", (name, case, dtype)) for case in cases if case.applies(member))
    if full and not only and device.type == "cuda":
        yield from (("stress", (stress,)) for stress in STRESS)


def _table(answers: "list[Answer]", where: str) -> Table:
    """The worst error of each tensor, over all cases, of outputs with and without gradients ("inferred o"); beside ours
    the torch backend's and the peers'."""
    cases = len({answer.case for answer in answers})
    table = Table("op", "dtype", "whose", title=f"worst relative L2 error over {cases} cases on {where}")
    for column in COLUMNS:
        table.add_column(column.replace("dinitial_state", "dS0").replace("final_state", "S"), justify="right")
    for op, dtype in dict.fromkeys((answer.op, answer.dtype) for answer in answers):
        mine = [a for a in answers if (a.op, a.dtype) == (op, dtype)]
        cells = [cell for a in mine for cell in a.cells if cell.case != "repeats"]
        shown = (_worst([(c.error, c.right) for c in cells if c.tensor.split()[-1] == t]) for t in COLUMNS)
        table.add_row(op, dtype, "ours", *shown)
        references = [cell for cell in cells if cell.reference is not None]
        if references:
            shown = (_worst([(c.reference, True) for c in references if c.tensor == t]) for t in COLUMNS)
            table.add_row("", "", "torch", *shown)
        for peer in dict.fromkeys(name for a in mine for name in a.peers):
            errors = [a.peers[peer].errors for a in mine if peer in a.peers and a.peers[peer].errors]
            if errors:
                shown = (_worst([(e[t], True) for e in errors if t in e]) for t in COLUMNS)
                table.add_row("", "", f"{peer}, {len(errors)} cases", *shown)
        if dtype == DTYPES[-1]:
            table.add_section()
    return table


def _worst(errors: list[tuple[float, bool]]) -> str:
    if not errors:
        return ""
    error, right = max(errors, key=lambda e: (not e[1], e[0]))
    return f"[{'default' if right else 'red'}]{error:.0e}"


def _print_wrong(console: Console, answer: "Answer") -> None:
    place = f"{answer.op} {answer.dtype}, case {answer.case!r}"
    if answer.failure is not None:
        console.print(f"{place}: {answer.failure}", style="red", markup=False)
    for cell in answer.cells:
        if cell.case == "repeats" and not cell.right:
            console.print(f"{place}: {cell.tensor} differed in {cell.error:g} of the repeats", style="red")
        elif not cell.right:
            console.print(
                f"{place}: {cell.tensor} is off by {cell.error:.1e}, {cell.allowed:.1e} is allowed", style="red"
            )
