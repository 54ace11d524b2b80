"""The work of `flash-delta check`: judge the cases and print a table of their worst errors."""

import sys
from bisect import insort
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flash_delta.cli.environment import require_device
from flash_delta.cli.files import reading, require_writable
from flash_delta.cli.tables import Table, show

if TYPE_CHECKING:
    import torch

    from flash_delta.testing.judging import Answer, Job, Peers

T = TypeVar("T")
COLUMNS = (
    "o",
    "final_state",
    "dq",
    "dk",
    "dv",
    "dg",
    "dbeta",
    "dp",
    "db",
    "dw",
    "dinitial_state",
    "dA_log",
    "ddt_bias",
)


def all_right(
    device: str,
    full: bool,
    widths: bool,
    hard: bool,
    case: str | None,
    backend: str | None = None,
    processes: int = 4,
    results: Path | None = None,
    resume: bool = False,
    peers: "Peers | None" = None,
) -> bool:
    """Judges all cases, prints, and returns whether everything is right. Arguments: those of `flash-delta check`, and
    other libraries that are judged beside it, by name."""
    from flash_delta.testing.judging import judge, names_of, read, write

    where = require_device(device)
    jobs = list(_jobs(full, widths, hard, case, where))
    order = {names_of(job): number for number, job in enumerate(jobs)}
    answers: list[Answer] = []

    def place(answer: "Answer") -> int:
        return order.get(answer.names, len(order))

    if resume:
        with reading("json", results, "flash-delta check"):
            answers = sorted(read(results, where), key=place)
    if results is not None:
        require_writable("json", results)
    done = {answer.names for answer in answers}
    jobs = [job for job in jobs if names_of(job) not in done]
    for answer in _counted(judge(jobs, where, backend, peers or {}, processes), len(jobs)):
        insort(answers, answer, key=place)
        if results is not None:
            write(results, answers, where)
    show([_table(answers, str(where))])
    for answer in answers:
        _print_wrong(answer)
    _print_growth({answer.case for answer in answers})
    cells = [cell for answer in answers for cell in answer.cells]
    print(f"{sum(cell.right for cell in cells):,} of {len(cells):,} tensors are right")
    return all(answer.right for answer in answers)


def same_when_shared(device: str, processes: int, rounds: int) -> bool:
    """Calls ops in several processes on one GPU, prints, and returns whether every result has the bits that it has when
    its process works alone."""
    from flash_delta.testing.shared import Sharer, judge_shared

    where = require_device(device)
    if where.type != "cuda":
        raise ValueError(f"shared: expected a GPU, which processes can share, got --device {device}")
    if processes < 2:
        raise ValueError(f"processes: expected at least 2 with --shared, got {processes}")
    answers = judge_shared(partial(Sharer, where), processes, rounds)
    for answer in answers:
        _print_wrong(answer)
    cells = [cell for answer in answers for cell in answer.cells]
    same = sum(cell.right for cell in cells)
    print(f"{same:,} of {len(cells):,} tensors kept their bits in {rounds} rounds of {processes} processes on {where}")
    return all(answer.right for answer in answers)


def _jobs(full: bool, widths: bool, hard: bool, only: str | None, device: "torch.device") -> "Iterator[Job]":
    from flash_delta.testing import CASES, HARD, MEMBERS, WIDTHS
    from flash_delta.testing.matrix import STRESS

    named = [case.at_widths(K, V) for K, V in WIDTHS for case in CASES] if widths else CASES + HARD
    chosen = HARD if hard else named if full or widths else [case for case in named if case.smoke]
    cases = chosen if only is None else [case for case in named if case.name == only]
    if not cases:
        raise ValueError(f"case: expected one of {', '.join(case.name for case in named)}, got {only!r}")
    for name, member in MEMBERS.items():
        applying = [case for case in cases if case.applies(member)]
        for dtype in ("float64", "float32", "bfloat16"):
            yield from (("case", (name, case, dtype)) for case in applying if dtype in case.dtypes)
    if full and not only and device.type == "cuda":
        yield from (("stress", (stress,)) for stress in STRESS)


def _counted(items: Iterable[T], total: int) -> Iterator[T]:
    """Passes the items on. On a terminal, a line shows how many there were. It is erased at the end."""
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            text = f"checking: {number} of {total}"
            print(f"\r{text}" if number < total else f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)
        yield item


def _table(answers: "list[Answer]", where: str) -> Table:
    """The worst error of each tensor over all cases, beside those of the torch backend and of peers. A hard case has
    rows of its own, with the error of rounding q and k. The error of an output is the worse one of the calls with and
    without gradients."""
    from flash_delta.testing import HARD

    cases, rows, hard = len({answer.case for answer in answers}), [], {case.name for case in HARD}
    groups = {}
    for answer in answers:
        case = answer.case if answer.case in hard else ""
        groups.setdefault((answer.op, answer.dtype, case), []).append(answer)
    for (op, dtype, case), mine in groups.items():
        op = f"{op}, {case}" if case else op
        cells = [cell for a in mine for cell in a.cells if cell.case != "repeats"]
        shown = (_worst([(c.error, c.right) for c in cells if c.tensor.split()[-1] == t]) for t in COLUMNS)
        rows.append((op, dtype, "ours", *shown))
        references = [cell for cell in cells if cell.reference is not None]
        if references:
            shown = (_worst([(c.reference, True) for c in references if c.tensor == t]) for t in COLUMNS)
            rows.append((op, dtype, "rounded keys" if case else "torch", *shown))
        for peer in dict.fromkeys(name for a in mine for name in a.peers):
            errors = [a.peers[peer].errors for a in mine if peer in a.peers and a.peers[peer].errors]
            if errors:
                shown = (_worst([(e[t], True) for e in errors if t in e]) for t in COLUMNS)
                rows.append((op, dtype, f"{peer}, {len(errors)} cases", *shown))
    names = (column.replace("dinitial_state", "dS0").replace("final_state", "S") for column in COLUMNS)
    title = f"worst relative L2 error over {cases} cases on {where}; one that is too large is marked with !"
    title += "; dg, dA_log and ddt_bias are compared with the terms that they sum"
    return Table(("op", "dtype", "whose", *names), rows, title)


def _worst(errors: list[tuple[float, bool]]) -> str:
    if not errors:
        return ""
    error, right = max(errors, key=lambda e: (not e[1], e[0]))
    return f"{error:.0e}{'' if right else '!'}"


def _print_wrong(answer: "Answer") -> None:
    place = f"{answer.op} {answer.dtype}, case {answer.case!r}"
    if answer.failure is not None:
        print(f"{place}: {answer.failure}")
    for cell in answer.cells:
        if cell.case in ("repeats", "shared") and not cell.right:
            times = "rounds" if cell.case == "shared" else "repeats"
            print(f"{place}: {cell.tensor} differed in {cell.error:g} of the {times}")
        elif not cell.right:
            print(f"{place}: {cell.tensor} is off by {cell.error:.1e}, {cell.allowed:.1e} is allowed")


def _print_growth(names: set[str]) -> None:
    """Says by how much states grow in the cases where they do."""
    from flash_delta.testing import CASES
    from flash_delta.testing.matrix import growth

    for case in CASES:
        if case.name in names and case.keys == "stretching":
            one, every = growth(case)
            told = f"an erase of GDN-2 stretches states by up to {one:.2f}, {case.T} by {every:,.0f}"
            print(f"case {case.name!r}: {told}")
