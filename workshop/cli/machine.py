"""`flash-delta-dev machine`: a report of a machine, to send in."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flash_delta.cli.checking import all_right
from flash_delta.cli.environment import require_device
from flash_delta.cli.files import PATH, require_writable
from workshop.cli.bench import show

if TYPE_CHECKING:
    import torch

    from workshop.bench import Group
    from workshop.bench.floor import Ceilings
    from workshop.machine.report import Report

TIMEOUT_S = 300.0  # for one question, and for one step of a row


def machine(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.", **PATH)],
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cuda",
) -> None:
    """Check the ops, time a few calls, and write a report of this machine to send in; exit code 1 if anything failed.

    A kernel that fails costs its own row, and the report has its error. So does a result that is off, with what is
    allowed. The report has versions and facts of the hardware. It has no name of a host or user, no path and no serial
    number. It is written after each part: facts, check, times. docs/machines.md says how to send it in.
    """
    from workshop.machine.report import Report

    where = require_device(device)
    require_writable("out", out)
    report, console = Report(), Console()
    rates = _ask(where, report)
    report.write(out)
    report.check = _checked(device)
    report.write(out)
    report.bench = _timed(where, rates)
    report.write(out)
    show(console, report.bench)
    for failure in report.broken:  # the others are above
        console.print(failure, style="red", soft_wrap=True, markup=False, highlight=False)
    failures = len(report.failures())
    console.print(f"wrote {out}, which names {failures} failures", soft_wrap=True, highlight=False)
    if failures:
        raise typer.Exit(1)


def _ask(where: "torch.device", report: "Report") -> "Ceilings | None":
    """Puts facts into the report, and returns the rates of a GPU. A question without an answer is a failure."""
    from flash_delta.testing import Isolated, Lost, Refused
    from workshop.machine.probe import Probe

    probe, answers = Isolated(partial(Probe, where), TIMEOUT_S), {}
    try:
        for question in ("machine", "backends", "ceilings"):
            try:
                answers[question] = probe.call(question)
            except (Refused, Lost) as error:
                report.broken.append(f"{question}: {error}")
    finally:
        probe.stop()
    report.machine, report.backends = answers.get("machine", {}), answers.get("backends", {})
    return answers.get("ceilings")


def _checked(device: str) -> list[dict]:
    """The lines of `flash-delta check --json`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "check.json"
        all_right(device, full=False, widths=False, hard=False, case=None, results=path)
        return json.loads(path.read_text())["cases"]


def _timed(where: "torch.device", rates: "Ceilings | None") -> "Group":
    """A few rows of the benchmark. The check has compiled some of their kernels already, so first calls get no time."""
    from flash_delta.testing.machine import machine as facts
    from workshop.bench import Group, few, run_group, versions
    from workshop.bench.contestants import OURS

    group = Group("machine", facts(where), versions(OURS), rates)
    group.results.extend(run_group(few(where), (OURS,), where, rates, TIMEOUT_S, keep_caches=True))
    return group
