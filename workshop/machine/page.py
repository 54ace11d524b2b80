"""The table of reports in ``docs/machines.md``."""

from pathlib import Path

from workshop.bench.cells import Table, between_marks, in_markdown, number, without_empty_columns
from workshop.machine.report import Report, name_of

NONE = "No report has been received yet."


def write_machines(results: Path, page: Path) -> Path:
    """Writes the reports of a folder into the table of the page, and returns the page."""
    reports = {path.name: Report.read(path) for path in sorted(results.glob("*.json"))}
    new = in_markdown(table(reports)) if reports else [NONE]
    page.write_text(between_marks(page.read_text(encoding="utf-8"), "machines", new), encoding="utf-8")
    return page


def table(reports: dict[str, Report]) -> Table:
    """A row for each report by its file's name: what was found to be right, what failed, and milliseconds."""
    times = {file: _times(report) for file, report in reports.items()}
    columns = list(dict.fromkeys(name for found in times.values() for name in found))
    rows = []
    for file, report in reports.items():
        facts = report.machine
        what = facts.get("gpu") or facts.get("cpu", "")
        versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "hip") if name in facts)
        wrong = {failure.split(",")[0].split(":")[0] for failure in report.failures()}
        right = f"{sum(_right(line) for line in report.check)} of {len(report.check)}"
        rows.append([
            file, what, facts.get("chip", ""), facts.get("flash_delta", ""), versions, right,
            ", ".join(sorted(wrong)), *(times[file].get(name, "") for name in columns),
        ])  # fmt: skip
    head = ["report", "machine", "chip", "version", "with", "cases that are right", "what failed"]
    return without_empty_columns(Table([*head, *(f"{name}, ms" for name in columns)], rows))


def _times(report: Report) -> dict[str, str]:
    results = report.bench.results if report.bench else ()
    return {name_of(result): number(result.ms.median) for result in results if result.ms}


def _right(line: dict) -> bool:
    return "failure" not in line and all(error <= allowed for error, allowed, _ in line["errors"].values())
