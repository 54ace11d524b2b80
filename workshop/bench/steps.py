"""Tables of whole steps: a line for every contestant, and a column for every form in which users run it."""

from collections.abc import Iterator
from dataclasses import replace

from workshop.bench.cells import Table, number, without_empty_columns
from workshop.bench.contestants import OURS
from workshop.bench.results import Group, Result, row_label

FORMS = {"called": "eager", "compiled": "torch.compile", "reduce-overhead": "reduce-overhead", "graphed": "graphed"}

Forms = dict[str, Result]  # one contestant's results on one step, by form
Steps = dict[str, dict[str, Forms]]  # by the step's row without its form, then by contestant


def of(group: Group) -> list[Table]:
    return [times(group), host(group), memory(group), further(group)]


def steps(group: Group) -> Steps:
    found: Steps = {}
    for result in group.results:
        if result.workload.form and result.ms:
            row = row_label(replace(result.workload, form=""))
            found.setdefault(row, {}).setdefault(result.contestant, {})[result.workload.form] = result
    return found


def times(group: Group) -> Table:
    """Milliseconds of a step: as a CUDA graph, and in each form as a loop in Python sees it."""
    rows = [[row, name, *map(number, _ms(forms))] for row, name, forms in _lines(group)]
    return without_empty_columns(Table(["step, ms", "contestant", "CUDA graph", *FORMS.values()], rows))


def host(group: Group) -> Table:
    """Microseconds until the call returns. The contestants took turns, so their ratio to ours says more."""
    found, rows = steps(group), []
    for row, name, forms in _lines(group):
        pairs = zip(_host(forms), _host(found[row].get(OURS, {})), strict=True)
        cells = [f"{us:,.0f}" + (f" ({us / ours:.2f}x)" if ours else "") if us else "" for us, ours in pairs]
        rows.append([row, name, *cells])
    return without_empty_columns(Table(["host, us (over ours)", "contestant", *FORMS.values()], rows))


def memory(group: Group) -> Table:
    """Memory that steps keep for the backward pass, the most that they need, and the share of an eager step in which
    the GPU waits for the host. The CUDA graph of the same step has no host to wait for."""
    rows = []
    for row, name, forms in _lines(group):
        costs = [forms[form].costs if form in forms else None for form in FORMS]
        saved, peak = ([number(getattr(c, what)) if c else "" for c in costs] for what in ("saved_mb", "peak_mb"))
        graph, eager, *_ = _ms(forms)
        idle = f"{max(0.0, 1 - graph / eager):.0%}" if graph and eager else ""
        rows.append([row, name, *saved, *peak, idle])
    whats = ("saved for backward MB", "peak extra MB")
    head = ["step", "contestant", *(f"{what}, {form}" for what in whats for form in FORMS.values())]
    return without_empty_columns(Table([*head, "GPU idle in eager"], rows))


def further(group: Group) -> Table:
    """What one more layer takes: several layers less one, over the number of further layers."""
    found, rows = steps(group), []
    for _, name, forms in _lines(group):
        several = next(iter(forms.values())).workload
        row = row_label(replace(several, form="", layers=1))
        one = found.get(row, {}).get(name)
        if several.layers > 1 and one:
            pairs = zip(_ms(forms) + _host(forms), _ms(one) + _host(one), strict=True)
            more = [(a - b) / (several.layers - 1) if a and b else None for a, b in pairs]
            rows.append([row, name, *map(number, more)])
    host_of = [f"host of {form}, us" for form in FORMS.values()]
    head = ["one more layer", "contestant", "CUDA graph, ms", *(f"{form}, ms" for form in FORMS.values()), *host_of]
    return without_empty_columns(Table(head, rows))


def _lines(group: Group) -> Iterator[tuple[str, str, Forms]]:
    for row, found in steps(group).items():
        yield from ((row, name, forms) for name, forms in found.items())


def _ms(forms: Forms) -> list[float | None]:
    called = forms.get("called")
    graph = called.graph_ms.median if called and called.graph_ms else None
    return [graph, *(forms[form].eager_ms.median if form in forms else None for form in FORMS)]


def _host(forms: Forms) -> list[float | None]:
    return [forms[form].host_us.median if form in forms and forms[form].host_us else None for form in FORMS]
