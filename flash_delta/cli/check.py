"""`flash-delta check`: every op and gradient against the float64 reference, on this machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_delta.cli.environment import require_device

if TYPE_CHECKING:
    import torch

    from flash_delta.testing import Case

COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dp", "dinitial_state", "dA_log", "ddt_bias")
DTYPES = ("float64", "float32", "bfloat16")


class Cell(NamedTuple):
    """One output or gradient of one op on one case."""

    op: str
    dtype: str
    case: str
    tensor: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


def check(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="All named cases, not only the short list.")] = False,
    backend: Annotated[str | None, typer.Option(help="Check this backend; none: the one the library takes.")] = None,
) -> None:
    """Compare outputs and all gradients with the token-by-token recurrence in float64; exit code 1 if any is off."""
    from flash_delta.testing import CASES, MEMBERS

    cases = [case for case in CASES if full or case.smoke]
    rows = [(name, dtype) for name in MEMBERS for dtype in DTYPES]
    console = Console()
    console = Console(width=max(console.width, 130)) if not console.is_terminal else console
    shown = track(rows, "checking", console=console, transient=True, disable=not console.is_terminal)
    where = require_device(device)
    cells = [cell for name, dtype in shown for cell in _cells(name, dtype, cases, where, backend)]
    console.print(_table(rows, cells, f"worst relative L2 error over {len(cases)} cases on {where}"))
    wrong = [cell for cell in cells if not cell.right]
    for cell in wrong:
        console.print(f"[red]{cell.op} {cell.dtype}, case {cell.case!r}: {cell.tensor} is off by {cell.error:.1e},"
                      f" {cell.allowed:.1e} is allowed")  # fmt: skip
    console.print(f"{len(cells) - len(wrong):,} of {len(cells):,} tensors are right")
    if wrong:
        raise typer.Exit(1)


def _cells(name: str, dtype: str, cases: "list[Case]", device: "torch.device", backend: str | None) -> Iterator[Cell]:
    import torch

    from flash_delta.testing import ALLOWED, MEMBERS, make_inputs, relative_error, run, truth

    member, torch_dtype = MEMBERS[name], getattr(torch, dtype)
    for case in cases:
        if not case.applies(member):
            continue
        inputs = make_inputs(case, member, torch_dtype, device)
        want, got = truth(member, inputs), run(member, inputs, backend)
        for tensor, value in want.items():
            error = relative_error(got[tensor], value)
            yield Cell(name, dtype, case.name, tensor, error, ALLOWED[torch_dtype])


def _table(rows: list[tuple[str, str]], cells: list[Cell], title: str) -> Table:
    table = Table("op", "dtype", *(c.replace("dinitial_state", "dS0").replace("final_state", "S") for c in COLUMNS))
    table.title = title
    for name, dtype in rows:
        worst = []
        for tensor in COLUMNS:
            found = [cell for cell in cells if (cell.op, cell.dtype, cell.tensor) == (name, dtype, tensor)]
            cell = max(found, key=lambda cell: cell.error, default=None)
            worst.append("" if cell is None else f"[{'green' if cell.right else 'red'}]{cell.error:.0e}")
        table.add_row(name, dtype, *worst, end_section=dtype == DTYPES[-1])
    return table
