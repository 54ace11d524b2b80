"""`flash-delta-dev compile`: compiles every kernel for every target, without a GPU, and checks the result."""

from itertools import chain, groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_delta.cli.files import PATH, reading, require_writable
from flash_delta.compiler.pool import Job, Result, compile_all, find_jobs
from flash_delta.compiler.targets import TARGETS
from workshop.cli.modules import require_modules
from workshop.gate.record import Rows, changes, read, rows, within, write
from workshop.gate.rules import MODULES, faults, judge

RECORD = Path("benchmarks/compile")
NUMBERS = ("registers", "spilled", "shared", "warps", "instructions")
TELLING = ("HGMMA", "WARPGROUP.DEPBAR", "UTCHMMA", "HMMA", "mfma", "UTMALDG", "LDGSTS")  # in the table


def compile_kernels(
    modules: Annotated[list[str] | None, typer.Argument(help="Modules of kernels; none: all.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TARGETS)}; none: all.")] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Compile only launches that have changed since they were recorded.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Record kernels without faults.")] = False,
    spills: Annotated[
        bool, typer.Option("--spills", help="Allow more spills than recorded. The note of the day says why.")
    ] = False,
    record: Annotated[
        Path, typer.Option(help="Folder with what was found before, a file per Triton.", **PATH)
    ] = RECORD,
) -> None:
    """Compile every launch that the tables of tiles can select; exit code 1 if one is not as it should be.

    As it should be: nothing spills more than it did when it was recorded, no wgmma is serialised, no product is
    transposed and multiplied again, shared memory suffices, and the numbers are those recorded for this version of
    Triton. A kernel that is not recorded must not spill. Run it in a checkout.

    A row of the record has a key, which follows from the kernel's source, its arguments, options, target and compiler,
    and from the code that finds the numbers. With --stale a launch is compiled only if one of its keys is another.
    """
    if spills and not update:
        raise ValueError("spills: expected --update beside it, got --spills alone")
    names, targets = modules or list(MODULES), target or list(TARGETS)
    for name in targets:
        if name not in TARGETS:
            raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    require_modules(names)
    console = Console()
    console = Console(width=max(console.width, 180)) if not console.is_terminal else console
    triton, jobs = find_jobs(names, targets)
    path = record / f"triton-{triton}.json"
    recorded, known = _recorded(path, names, targets)
    if update:
        require_writable("record", path)
    held: list[Result] = []
    if stale:
        jobs, held = _divide(jobs, known, console)
    compiled = _compile(jobs, console)
    results, new = held + compiled, rows(held + compiled)
    limits = new if spills else known
    if compiled:
        console.print(_table(compiled, limits, triton))
    wrong = judge(results, limits)
    if update:
        right = rows(result for result in results if not any(faults(result, limits)))
        replaced = right.keys() | (known.keys() - new.keys())  # rows of faulty kernels stay as they are
        write(path, {key: row for key, row in recorded.items() if key not in replaced} | right)
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    elif path.exists():
        wrong += [f"changed (--update records it): {change}" for change in changes(known, new)]
    else:
        console.print(f"nothing is recorded for Triton {triton} ({path}): no kernel may spill", soft_wrap=True)
    for line in wrong:
        console.print(line, style="red", soft_wrap=True, markup=False, highlight=False)
    if wrong:
        raise typer.Exit(1)
    console.print(f"{len(results)} kernels are as they should be ({len(compiled)} of them compiled now)")


def _divide(jobs: list[Job], known: Rows, console: Console) -> tuple[list[Job], list[Result]]:
    """The launches that are stale, which it names, and what is recorded of the others."""
    from workshop.gate.stale import divide  # imports Triton

    stale, held = divide(jobs, known)
    console.print(f"{len(stale)} of {len(jobs)} launches are stale")
    for job in stale:
        console.print(f"{job.module}/{job.launch}, {job.target}", soft_wrap=True, markup=False, highlight=False)
    return stale, held


def _compile(jobs: list[Job], console: Console) -> list[Result]:
    from workshop.gate.facts import facts  # imports Triton

    results = track(compile_all(jobs, facts), "compiling", total=len(jobs), console=console, transient=True,
                    disable=not console.is_terminal)  # fmt: skip
    return sorted(chain.from_iterable(results), key=lambda r: (r.kernel, list(TARGETS).index(r.target)))


def _recorded(path: Path, names: list[str], targets: list[str]) -> tuple[Rows, Rows]:
    """All rows of the file, if it exists, and the rows that this run would replace."""
    with reading("record", path, "flash-delta-dev compile --update"):
        rows = read(path) if path.exists() else {}
        return rows, within(rows, names, targets)


def _table(results: list[Result], limits: Rows, triton: str) -> Table:
    table = Table("kernel", "target", title=f"compiled by Triton {triton}")
    for column in NUMBERS:
        table.add_column(column, justify="right")
    table.add_column("in the code")
    table.add_column("faults")
    for kernel, group in groupby(results, lambda result: result.kernel):
        for number, result in enumerate(group):
            facts = result.facts or {}
            numbers = [str(facts.get(name, "")) for name in NUMBERS]
            code = [f"{facts[name]} {name}" for name in TELLING if name in facts] + facts.get("warnings", [])
            found = ", ".join(fault.kind for fault in faults(result, limits))
            table.add_row("" if number else kernel, result.target, *numbers, ", ".join(code), found)
        table.add_section()
    return table
