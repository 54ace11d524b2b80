"""`flash-delta check`: every op and gradient against the float64 reference, on this machine."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_delta.cli.environment import require_device

if TYPE_CHECKING:
    import torch

    from flash_delta.bench import PeerAnswer
    from flash_delta.testing.matrix import Cell

COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dp", "dinitial_state", "dA_log", "ddt_bias")
DTYPES = ("float64", "float32", "bfloat16")
PEERS_DTYPES = ("float32", "bfloat16")
TIMEOUT_S = 600.0  # of one case in one process: a peer may tune for minutes


@dataclass
class Answer:
    """What became of one case of one op in one dtype."""

    op: str
    dtype: str
    case: str
    cells: "list[Cell]" = field(default_factory=list)
    failure: str | None = None  # nothing came back
    peers: "dict[str, PeerAnswer]" = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.failure is None and all(cell.right for cell in self.cells)


def check(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="All named cases; on a GPU also full-size problems.")] = False,
    case: Annotated[str | None, typer.Option(help="Only this case.")] = None,
    backend: Annotated[str | None, typer.Option(help="Check this backend; none: the one the library takes.")] = None,
    peers: Annotated[str | None, typer.Option(help="Comma-separated peers to judge beside it, or 'all'.")] = None,
    processes: Annotated[int, typer.Option(help="On a GPU: so many cases at a time.", min=1)] = 4,
    results: Annotated[Path | None, typer.Option("--json", help="Also write every error here.")] = None,
) -> None:
    """Compare outputs and all gradients with the token-by-token recurrence in float64; exit code 1 if any is off.

    On a GPU the work runs in processes of its own, so that a crash costs one case. --full adds there what only shows at
    full size: 100 bitwise equal repeats, more than 1,024 blocks, tensors of more than 2^31 elements.
    """
    where = require_device(device)
    console = Console()
    console = Console(width=max(console.width, 130)) if not console.is_terminal else console
    jobs = list(_jobs(full, case, where))
    answers = []
    for answer in track(_answers(jobs, where, backend, peers, processes), "checking", total=len(jobs), console=console,
                        transient=True, disable=not console.is_terminal):  # fmt: skip
        answers.append(answer)
        if results is not None:
            _write(results, answers, where)
    console.print(_table(answers, str(where)))
    for answer in answers:
        _print_wrong(console, answer)
    cells = [cell for answer in answers for cell in answer.cells]
    console.print(f"{sum(cell.right for cell in cells):,} of {len(cells):,} tensors are right")
    if not all(answer.right for answer in answers):
        raise typer.Exit(1)


def _jobs(full: bool, only: str | None, device: "torch.device") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Method of the judge and its arguments."""
    from flash_delta.testing import CASES, MEMBERS
    from flash_delta.testing.matrix import STRESS

    cases = [case for case in CASES if (case.name == only if only else full or case.smoke)]
    if not cases:
        raise ValueError(f"case: expected one of {', '.join(case.name for case in CASES)}, got {only!r}")
    for name, member in MEMBERS.items():
        for dtype in DTYPES:
            yield from (("case", (name, case, dtype)) for case in cases if case.applies(member))
    if full and not only and device.type == "cuda":
        yield from (("stress", (stress,)) for stress in STRESS)


class Worker:
    """Judges one job after the other: on a GPU and for peers in processes of its own."""

    def __init__(self, device: "torch.device", backend: str | None, peers: list[str]):
        from flash_delta.bench import Peer
        from flash_delta.testing import Isolated
        from flash_delta.testing.matrix import Judge

        self.isolated = Isolated(partial(Judge, device, backend), TIMEOUT_S) if device.type == "cuda" else None
        self.judge = Judge(device, backend)
        self.peers = {name: Isolated(partial(Peer, name, device), TIMEOUT_S) for name in peers}

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        from flash_delta.bench import PeerAnswer
        from flash_delta.testing import Lost, Refused, first_line

        stress = method == "stress"
        op, case, dtype = (arguments[0].workload.member, arguments[0], "bfloat16") if stress else arguments
        answer = Answer(op, dtype, case.name)
        try:
            if self.isolated is not None:
                answer.cells = self.isolated.call(method, *arguments)
            else:
                answer.cells = getattr(self.judge, method)(*arguments)
        except (Refused, Lost) as error:
            answer.failure = str(error)
        except RuntimeError as error:  # here, without a process in between
            answer.failure = first_line(error)
        for name, peer in self.peers.items() if not stress and dtype in PEERS_DTYPES else ():
            try:
                answer.peers[name] = peer.call("case", *arguments)
            except (Refused, Lost) as error:
                answer.peers[name] = PeerAnswer({}, str(error))
        return answer

    def stop(self) -> None:
        for process in [*self.peers.values(), *([self.isolated] if self.isolated else [])]:
            process.stop()


def _answers(
    jobs: list[tuple[str, tuple[Any, ...]]], device: "torch.device", backend: str | None, peers: str | None,
    processes: int,
) -> Iterator[Answer]:  # fmt: skip
    """In the order of the jobs; those that fill a GPU's memory, which come last, one at a time."""
    from flash_delta.bench import versions

    names = [n for n in versions(None if peers == "all" else peers) if n != "flash_delta"] if peers else []
    workers = [Worker(device, backend, names) for _ in range(processes if device.type == "cuda" else 1)]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def answer(job: tuple[str, tuple[Any, ...]]) -> Answer:
        worker = free.get()
        try:
            return worker.answer(*job)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(len(workers)) as threads:
            yield from threads.map(answer, [job for job in jobs if job[0] == "case"])
        yield from (workers[0].answer(*job) for job in jobs if job[0] == "stress")
    finally:
        for worker in workers:
            worker.stop()


def _table(answers: list[Answer], where: str) -> Table:
    """The worst error of each tensor, over all cases; beside ours the torch backend's and the peers'."""
    cases = len({answer.case for answer in answers})
    table = Table("op", "dtype", "whose", title=f"worst relative L2 error over {cases} cases on {where}")
    for column in COLUMNS:
        table.add_column(column.replace("dinitial_state", "dS0").replace("final_state", "S"), justify="right")
    for op, dtype in dict.fromkeys((answer.op, answer.dtype) for answer in answers):
        mine = [a for a in answers if (a.op, a.dtype) == (op, dtype)]
        cells = [cell for a in mine for cell in a.cells if cell.case != "repeats"]
        shown = (_worst([(c.error, c.right) for c in cells if c.tensor == t]) for t in COLUMNS)
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


def _print_wrong(console: Console, answer: Answer) -> None:
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


def _write(path: Path, answers: list[Answer], device: "torch.device") -> None:
    """One line per case: [error, allowed, torch backend's error] by tensor, and the peers' errors."""
    from flash_delta.bench import machine

    def rounded(x: float | None) -> float | None:
        return None if x is None else float(f"{x:.3g}")

    lines = []
    for a in answers:
        line = {"op": a.op, "dtype": a.dtype, "case": a.case}
        if a.failure is not None:
            line["failure"] = a.failure
        line["errors"] = {c.tensor: [rounded(c.error), rounded(c.allowed), rounded(c.reference)] for c in a.cells}
        peers = {
            name: {"errors": {t: rounded(e) for t, e in peer.errors.items()}, "reason": peer.reason}
            for name, peer in a.peers.items()
        }
        lines.append(json.dumps(line | ({"peers": peers} if peers else {})))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(lines)
    path.write_text(f'{{"machine": {json.dumps(machine(device))},\n "cases": [\n  {rows}\n]}}\n')
