"""Results as tables of words, for ``docs/benchmarks.md`` and for the page."""

from collections.abc import Iterator
from statistics import geometric_mean, median
from typing import NamedTuple

from flash_delta.bench.contestants import OURS, PLAIN
from flash_delta.bench.floor import floor
from flash_delta.bench.results import Group, Result


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def of(group: Group) -> list[Table]:
    """Those that have something to say."""
    tables = (times(group), eager(group), bandwidth(group), costs(group), accuracy(group))
    return [table for table in tables if table.rows]


def contestants(group: Group) -> list[str]:
    """Those with at least one time; ours first."""
    return [name for name in group.versions if any(r.ms for r in group.results if r.contestant == name)]


def times(group: Group) -> Table:
    """Median milliseconds per row, the best one bold; a dagger marks what no CUDA graph could hold."""
    names, rows = contestants(group), []
    ratios: dict[str, list[float]] = {}  # by kind of row
    for row, results in group.rows().items():
        found = {r.contestant: r for r in results if r.ms}
        best = min((r.ms.median for r in found.values()), default=None)
        peers = [r.ms.median for name, r in found.items() if name != OURS]
        ours = found[OURS].ms.median if OURS in found else None
        if ours and peers and PLAIN not in names:  # of options that cost and of calls that spare others, no mean
            ratios.setdefault(results[0].workload.kind, []).append(min(peers) / ours)
        rows.append([
            row,
            *(_time(found.get(name), best, group) for name in names),
            number(results[0].floor_ms),
            f"{best / results[0].floor_ms:.1f}" if best and results[0].floor_ms else "",
            f"{min(peers) / ours:.2f}x" if ours and peers else "",
        ])  # fmt: skip
    for kind, values in ratios.items():
        rows.append([f"{kind}, geometric mean", *[""] * (len(names) + 2), f"{geometric_mean(values):.2f}x"])
    head = ["row, ms", *names, "floor", "best / floor", "ours against the best peer"]
    return _without_empty_columns(Table(head, rows))


def eager(group: Group) -> Table:
    """What a loop in Python sees, of calls that come in place of several others."""
    rows = []
    for row, results in group.rows().items():
        found = {r.contestant: r.eager_ms.median for r in results if r.eager_ms}
        if found.keys() == {OURS, PLAIN}:
            rows.append([row, number(found[OURS]), number(found[PLAIN]), f"{found[PLAIN] / found[OURS]:.2f}x"])
    return Table(["eager calls, ms", OURS, PLAIN, "ours against plain"], rows)


def _time(result: Result | None, best: float | None, group: Group) -> str:
    if result is None:
        return "-"
    text = number(result.ms.median)
    text = f"**{text}**" if result.ms.median == best else text
    return text if result.graph_ms or group.group == "cpu" else f"{text} †"


def bandwidth(group: Group) -> Table:
    """Of decoding, which memory bounds: the bytes that must move over the time, as a share of this run's copy rate."""
    names, rows = contestants(group), []
    for row, results in group.rows().items():
        if group.ceilings is not None and results[0].workload.kind == "decode":
            bound = 1e3 * floor(results[0].workload).bytes / group.ceilings.measured_bytes_per_s
            found = {r.contestant: bound / r.ms.median for r in results if r.ms}
            rows.append([row, *(f"{found[name]:.0%}" if name in found else "-" for name in names)])
    return Table(["share of the copy rate", *names], rows)


def costs(group: Group) -> Table:
    """Per contestant what is felt beside the time."""
    rows = []
    for name in contestants(group):
        results = [r for r in group.results if r.contestant == name and r.ms]
        later = [r.first_call_s for r in results if not r.cold]
        lengths = next((r.lengths for r in results if r.lengths), None)
        host = [r.costs.host_us for r in results if r.costs and r.costs.host_us is not None]
        eager = [r.eager_ms.median / r.graph_ms.median for r in results if r.graph_ms and r.eager_ms]
        peak = next((r.costs.peak_mb for r in results if r.costs), None)
        saved = next((r.costs.saved_mb for r in results if r.costs and r.costs.saved_mb is not None), None)
        rows.append([
            f"{name} {group.versions[name]}",
            ", ".join(f"{r.first_call_s:.1f}" for r in results if r.cold),
            f"{max(later):.1f}" if later else "",
            f"{lengths.stalls} of {lengths.tried}: {lengths.stalled_s:.1f} s" if lengths else "",
            "" if lengths is None or lengths.compilations is None else str(lengths.compilations),
            f"{median(host):.0f}" if host else "",
            f"{max(eager):.1f}" if eager else "",
            number(peak),
            number(saved),
        ])  # fmt: skip
    head = [
        "", "first call, empty caches, s", "longest later first call, s", "stalls over random lengths",
        "compilations over them", "host, median us", "eager / graph, worst", "peak extra MB, first row",
        "saved for backward MB, first row",
    ]  # fmt: skip
    return _without_empty_columns(Table(head, rows))


def accuracy(group: Group) -> Table:
    """Per contestant the worst relative L2 error of each result over the group's rows."""
    tensors = list(dict.fromkeys(t for r in group.results for t in r.errors))
    rows = []
    for name in group.versions:
        errors = [r.errors for r in group.results if r.contestant == name and r.errors]
        if errors:
            worst = [max((e[t] for e in errors if t in e), default=None) for t in tensors]
            rows.append([name, *("" if w is None else f"{w:.1e}" for w in worst)])
    return Table(["relative L2 error", *tensors], rows)


def refusals(group: Group) -> Iterator[str]:
    """Who has no time where, and why; what else could not be measured."""
    said: dict[tuple[str, str], list[str]] = {}
    for result in group.results:
        for reason in [result.reason] if result.reason else result.notes:
            said.setdefault((result.contestant, reason), []).append(result.row)
    for (name, reason), rows in said.items():
        where = "all rows" if len(rows) == len(group.rows()) else ", ".join(rows)
        yield f"{name}, {where}: {reason}"


def number(value: float | None) -> str:
    """Three digits or more."""
    if value is None:
        return ""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def _without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    return Table([table.head[i] for i in kept], [[row[i] for i in kept] for row in table.rows])
