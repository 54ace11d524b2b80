"""Results as tables of words, for ``docs/benchmarks.md`` and for the page."""

import re
from collections.abc import Iterator
from statistics import geometric_mean, median

from workshop.bench import steps
from workshop.bench.cells import Table, number, without_empty_columns
from workshop.bench.contestants import AGAIN, BY_NAME, OURS, PLAIN, ready_made
from workshop.bench.floor import floor
from workshop.bench.results import Group, Result

NO_GRAPH, APART, READY = "†", "‡", "§"


def of(group: Group) -> list[Table]:
    """All tables of a group that are not empty."""
    own = (*steps.of(group), choices(group), eager(group), bandwidth(group))
    tables = (times(group), *own, costs(group), accuracy(group))
    return [table for table in tables if table.rows]


def contestants(group: Group) -> list[str]:
    """The contestants that have at least one time, ours first."""
    return [name for name in group.versions if any(r.ms for r in group.results if r.contestant == name)]


def times(group: Group) -> Table:
    """Median milliseconds per row, the best one bold, with the marks that ``remarks`` explains."""
    names, rows = contestants(group), []
    ratios: dict[str, list[tuple[float, bool]]] = {}  # by kind of row, and whether of two runs
    for row, results in group.rows().items():
        found = {r.contestant: r for r in results if r.ms}
        ours = found.get(OURS)
        best = min(found.values(), key=_median, default=None)
        peers = [r for name, r in found.items() if name == PLAIN or name not in (OURS, *AGAIN)]
        peer = min(peers, key=_median, default=None)
        floor_ms, ratio = results[0].floor_ms, ""
        if ours and peer:
            pair = peer.over(ours), apart(peer, ours)
            ratio = _ratio(*pair)
            if PLAIN not in names:  # no mean over rows that are about different options
                ratios.setdefault(ours.workload.kind, []).append(pair)
        rows.append([
            row,
            *(_time(found[name], best, ours, group) if name in found else "-" for name in names),
            number(floor_ms),
            f"{best.ms.median / floor_ms:.1f}" if best and floor_ms else "",
            ratio,
        ])  # fmt: skip
    for kind, pairs in ratios.items():
        mean = _ratio(geometric_mean(ratio for ratio, _ in pairs), any(of_two for _, of_two in pairs))
        rows.append([f"{kind}, geometric mean", *[""] * (len(names) + 2), mean])
    head = ["row, ms", *names, "floor", "best / floor", "ours against the best peer"]
    return without_empty_columns(Table(head, rows))


def choices(group: Group) -> Table:
    """The time on the backend that a call chooses, over that on the best backend by name."""
    rows = []
    for row, results in group.rows().items():
        found = {r.contestant: r.ms.median for r in results if r.ms}
        best = min((name for name in BY_NAME if name in found), key=found.get, default=None)
        if best and OURS in found:
            rows.append([row, best, f"{found[OURS] / found[best]:.2f}x"])
    return Table(["time of the chosen backend", "best by name", "over its time"], rows)


def apart(result: Result, ours: Result | None) -> bool:
    """Whether the result comes from another run than ours, so that the two did not take turns."""
    return ours is not None and result.run != ours.run


def _median(result: Result) -> float:
    return result.ms.median


def _ratio(ratio: float, of_two_runs: bool) -> str:
    return f"{ratio:.2f}x" + f" {APART}" * of_two_runs


def _time(result: Result, best: Result, ours: Result | None, group: Group) -> str:
    text = number(result.ms.median)
    text = f"**{text}**" if result.ms.median == best.ms.median else text
    return " ".join([text, *_marks(result, ours, group)])


def _marks(result: Result, ours: Result | None, group: Group) -> Iterator[str]:
    if not result.graph_ms and group.group != "cpu" and result.workload.form in ("", "called"):
        yield NO_GRAPH
    if apart(result, ours):
        yield APART
    if ready_made(result.contestant, result.workload):
        yield READY


def remarks(group: Group) -> Iterator[str]:
    """Explains the marks that occur in the table of times, and says which contestant lacks a time in which row."""
    timed = [r for r in group.results if r.ms]
    ours = {r.row: r for r in timed if r.contestant == OURS}
    marks = {mark for r in timed for mark in _marks(r, ours.get(r.row), group)}
    if NO_GRAPH in marks:
        yield f"{NO_GRAPH} eager calls: there is no CUDA graph of this call. Its ratio compares eager calls"
    if APART in marks:
        yield f"{APART} measured in another run than {OURS}, on the same kind of machine: the two did not take turns"
    given = {r.contestant: what for r in timed if (what := ready_made(r.contestant, r.workload))}
    yield from (f"{READY} {name}: {what}" for name, what in given.items())
    yield from refusals(group)


def eager(group: Group) -> Table:
    """Eager times, as a loop in Python sees them, for calls that replace several other calls."""
    rows = []
    for row, results in group.rows().items():
        found = {r.contestant: r.eager_ms.median for r in results if r.eager_ms}
        if found.keys() == {OURS, PLAIN}:
            rows.append([row, number(found[OURS]), number(found[PLAIN]), f"{found[PLAIN] / found[OURS]:.2f}x"])
    return Table(["eager calls, ms", OURS, PLAIN, "ours against plain"], rows)


def bandwidth(group: Group) -> Table:
    """Shares of the copy rate in decoding, which is bound by memory: the bytes that must move, over the time. The rate
    is that of large copies. The last column is the share that a copy of the row's own bytes reaches."""
    names, rows = contestants(group), []
    for row, results in group.rows().items():
        if group.ceilings is not None and results[0].workload.kind == "decode":
            bound = 1e3 * floor(results[0].workload).bytes / group.ceilings.measured_bytes_per_s
            found = {r.contestant: bound / r.ms.median for r in results if r.ms}
            copied = next((r.costs.copy_ms for r in results if r.costs and r.costs.copy_ms), None)
            shares = [f"{found[name]:.0%}" if name in found else "-" for name in names]
            rows.append([row, *shares, f"{bound / copied:.0%}" if copied else ""])
    return without_empty_columns(Table(["share of the copy rate", *names, "a copy of as many bytes"], rows))


def costs(group: Group) -> Table:
    """Other costs of each contestant: first calls, host time, memory."""
    rows = []
    for name in contestants(group):
        results = [r for r in group.results if r.contestant == name and r.ms]
        later = [r.first_call_s for r in results if not r.cold and r.first_call_s is not None]
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
    return without_empty_columns(Table(head, rows))


def accuracy(group: Group) -> Table:
    """Per contestant the worst relative L2 error of each result over the group's rows, and over a row's layers."""
    tensors = list(dict.fromkeys(_of_any_layer(t) for r in group.results for t in r.errors))
    rows = []
    for name in group.versions:
        errors = [r.errors for r in group.results if r.contestant == name and r.errors]
        if errors:
            worst: dict[str, float] = {}
            for tensor, error in (item for e in errors for item in e.items()):
                worst[_of_any_layer(tensor)] = max(error, worst.get(_of_any_layer(tensor), 0.0))
            rows.append([name, *(f"{worst[t]:.1e}" if t in worst else "" for t in tensors)])
    return Table(["relative L2 error", *tensors], rows)


def _of_any_layer(tensor: str) -> str:
    """Removes the number of the layer: d3.A_log is the gradient of one of the parameters A_log."""
    return re.sub(r"^d\d+\.", "d", tensor)


def refusals(group: Group) -> Iterator[str]:
    """Says which contestant lacks a time in which row and why, and what else could not be measured."""
    said: dict[tuple[str, str], list[str]] = {}
    for result in group.results:
        for reason in [result.reason] if result.reason else result.notes:
            said.setdefault((result.contestant, reason), []).append(result.row)
    for (name, reason), rows in said.items():
        where = "all rows" if len(rows) == len(group.rows()) else ", ".join(rows)
        yield f"{name}, {where}: {reason}"
