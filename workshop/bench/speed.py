"""The chart and the tables of speed beside peers, of README and of the page of benchmarks."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from textwrap import wrap
from typing import NamedTuple

from flash_delta.page import render
from workshop.bench.cells import Table
from workshop.bench.contestants import AGAIN, OURS, PLAIN
from workshop.bench.results import Group
from workshop.bench.tables import APART, apart

OWN_CODE = "transformers"  # the peer that has no kernels
TITLE = f"Speed of {OURS} against the fastest peer"
READING = (
    "Each circle is one shape, beside the fastest of the peers under the name. It is hollow if the two times come from "
    "different runs. A bar is the geometric mean, which stands on the right. A triangle lies beyond the axis."
)
CHART = (
    "GDN prefill", "GDN training", "GDN pools prefill", "GDN decode", "GDN drafts", "KDA forward", "KDA training",
    "KDA decode", "GDN-2 training", "DeltaProduct training",
)  # fmt: skip  # of more kinds of rows, the chart shows these
NAMES = {
    "gdn-prefill": "GDN prefill",
    "gdn-long": "GDN long",
    "gdn-training": "GDN training",
    "kda-forward": "KDA forward",
    "kda-training": "KDA training",
    "kda-gates": "KDA gates",
    "gdn-mixed": "GDN mixed",
    "gdn-packed": "GDN packed",
    "kda-packed": "KDA packed",
    "gdn-pools": "GDN pools",
    "kda-pools": "KDA pools",
    "gdn-models": "GDN in models",
    "kda-models": "KDA in models",
    "comba": "Comba",
    "delta-rule": "Delta rule",
    "simple-gla": "Simple GLA",
    "family-kda": "KDA beside GDN-2",
    "family-gdn2": "GDN-2",
    "family-gdp": "DeltaProduct",
    "gdn-widths": "GDN widths",
    "kda-widths": "KDA widths",
    "decode": "GDN decode",
    "kda-decode": "KDA decode",
    "drafts": "GDN drafts",
    "kda-drafts": "KDA drafts",
    "layer": "Layer",
    "fla-gdn-forward": "GDN layer forward",
    "fla-gdn-training": "GDN layer training",
    "fla-kda-forward": "KDA layer forward",
    "fla-kda-training": "KDA layer training",
    "step": "GDN step",
    "step-transformers": "Layer step",
    "cpu": "GDN",
}  # names of groups; if a group has several kinds of rows, the kind follows

# The drawing is 480 units wide. On a phone it is 360 pixels wide, and letters of size 13 are still readable.
LEFT, RIGHT = 246.0, 420.0  # of the axis
TOP, LINE = 160.0, 38.0  # the middle of the first line, and the height of each
LETTERS = 68  # in a line of text
TICKS = (0.5, 1.0, 2.0, 4.0, 8.0)
SCHEMES = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "line": "#d1d9e0", "ahead": "#0a58ca", "behind": "#c2410c"},
    "dark": {"text": "#f0f6fc", "quiet": "#9198a1", "line": "#3d444d", "ahead": "#6cb6ff", "behind": "#ff9a57"},
}


class SpeedUp(NamedTuple):
    """The speed beside one peer on one row."""

    ratio: float  # its time over ours
    apart: bool  # the two times come from different runs


class Point(NamedTuple):
    """A row's speed-up, or a mean of several, on the chart."""

    ratio: float
    apart: bool
    x: float
    beyond: bool  # it lies beyond the end of the axis


class Line(NamedTuple):
    """One kind of rows on the chart."""

    name: str
    beside: str
    y: float
    points: list[Point]
    mean: Point
    label: str


class Kind(NamedTuple):
    """The rows of one kind of a group, each compared with the fastest peer that ran it."""

    name: str
    group: Group
    beside: list[str]  # the peers that ran at least one row
    fastest: list[SpeedUp]  # one for each row
    ahead: Counter[str]  # peers that are faster than this library, and in how many rows

    @property
    def mean(self) -> SpeedUp:
        return SpeedUp(geometric_mean(s.ratio for s in self.fastest), any(s.apart for s in self.fastest))


def fullest(groups: Iterable[Group]) -> list[Group]:
    """The groups, each once. If a group was measured on several GPUs, the run with the most times counts, and of equal
    ones the latest."""
    found: dict[str, Group] = {}
    for group in groups:
        rival = found.setdefault(group.group, group)
        found[group.group] = max(rival, group, key=_fullness)
    return list(found.values())


def _fullness(group: Group) -> tuple[int, str]:
    return sum(result.ms is not None for result in group.results), max(result.run for result in group.results)


def compared(group: Group) -> Iterator[tuple[str, dict[str, SpeedUp]]]:
    """Yields each row's kind and its peers. Rows that compare this library with plain calls of itself are left out."""
    for results in group.rows().values() if PLAIN not in group.versions else ():
        timed = {r.contestant: r for r in results if r.ms and r.contestant not in AGAIN}
        ours = timed.pop(OURS, None)
        if ours and timed:
            peers = {name: SpeedUp(r.over(ours), apart(r, ours)) for name, r in timed.items()}
            yield ours.workload.kind, peers


def kinds(groups: Sequence[Group]) -> list[Kind]:
    """All kinds of rows that have a name here. On a GPU this leaves out those that only transformers' own PyTorch code
    ran."""
    found = []
    for group in groups:
        rows = list(compared(group)) if group.group in NAMES else []
        names = dict.fromkeys(kind for kind, _ in rows)
        for this in names:
            peers = [peers for kind, peers in rows if kind == this]
            beside = list(dict.fromkeys(peer for row in peers for peer in row))
            if beside != [OWN_CODE] or not group.machine.get("gpu"):
                name = NAMES[group.group] + (f" {this}" if len(names) > 1 else "")
                ahead = Counter(peer for row in peers for peer, speed_up in row.items() if speed_up.ratio < 1)
                found.append(Kind(name, group, beside, [min(row.values()) for row in peers], ahead))
    return found


def on_the_chart(groups: Sequence[Group]) -> list[Kind]:
    found = kinds(groups)
    return found if len(found) <= len(CHART) else [kind for kind in found if kind.name in CHART]


def summary(found: Iterable[Kind]) -> Table:
    """A line for every kind: its mean, its range, and the peers that are ahead."""
    head = ["", "on, version", "beside", "against the fastest of them", "rows where one is ahead"]
    return Table(head, [_cells(kind) for kind in found])


def _cells(kind: Kind) -> list[str]:
    low, high = min(kind.fastest).ratio, max(kind.fastest).ratio
    spread = f" ({_times(low)} to {_times(high)})" if len(kind.fastest) > 1 else ""
    slower = [f"{peer} in {count} of {len(kind.fastest)}" for peer, count in kind.ahead.items()]
    return [
        kind.name, f"{short(kind.group)}, {kind.group.versions[OURS]}", ", ".join(kind.beside),
        f"{_times(kind.mean.ratio)}{spread}{f' {APART}' * kind.mean.apart}", ", ".join(slower) or "none",
    ]  # fmt: skip


def in_words(groups: Sequence[Group]) -> str:
    """The chart in words, for readers who cannot see it."""
    return "; ".join(
        f"{kind.name} {_times(kind.mean.ratio)} beside {', '.join(kind.beside)}" for kind in on_the_chart(groups)
    )


def chart(groups: Sequence[Group], scheme: str) -> str:
    """An SVG drawing for a light or a dark page, with a line for each kind of rows, ten at most."""
    found = on_the_chart(groups)
    groups = list({kind.group.group: kind.group for kind in found}.values())
    several = len({short(group) for group in groups}) > 1
    lines = [_line(kind, TOP + LINE * i, several) for i, kind in enumerate(found)]
    versions: dict[str, set[str]] = {}
    for kind in found:
        for name in (OURS, *kind.beside):  # rows of one group may be of two versions
            versions.setdefault(name, set()).update(kind.group.versions[name].split(" and "))
    named = [f"{name}\N{NO-BREAK SPACE}{' and '.join(sorted(found))}" for name, found in versions.items()]
    about = f"{device(groups)}, measured {dates(groups)}. {READING}"
    return render(
        "speed.svg.j2",
        Path(__file__).parent,
        title=TITLE,
        words=in_words(groups),
        about=wrap(about, LETTERS),
        one=_point(SpeedUp(1.0, False)).x,
        ticks=[(_point(SpeedUp(tick, False)).x, f"{tick:g}x") for tick in TICKS],
        lines=lines,
        top=TOP,
        bottom=TOP + LINE * len(lines) - LINE / 2,
        notes=wrap(", ".join(named), LETTERS),
        **SCHEMES[scheme],
    )


def device(groups: Sequence[Group]) -> str:
    """The names of all devices that the groups ran on."""
    machines = [group.machine for group in groups]
    return " and ".join(dict.fromkeys(m.get("gpu") or f"A CPU ({m['cpu']}, {m['threads']} threads)" for m in machines))


def short(group: Group) -> str:
    """The model of its GPU: the first word that has a digit."""
    gpu = group.machine.get("gpu")
    return "CPU" if gpu is None else next((word for word in gpu.split() if any(map(str.isdigit, word))), gpu)


def dates(groups: Sequence[Group]) -> str:
    """The first and the last day on which one of these times was measured."""
    days = sorted({r.run[:10] for group in groups for r in group.results if r.ms and r.run})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "on an unknown day"


def _line(kind: Kind, y: float, several: bool) -> Line:
    name = f"{kind.name}, {short(kind.group)}" if several else kind.name
    points = [_point(speed_up) for speed_up in kind.fastest]
    return Line(name, ", ".join(kind.beside), y, points, _point(kind.mean), _times(kind.mean.ratio))


def _point(speed_up: SpeedUp) -> Point:
    """The point on the logarithmic axis. Values beyond its end are drawn at the end."""
    share = math.log(speed_up.ratio / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
    x = LEFT + (RIGHT - LEFT) * min(max(share, 0.0), 1.0)
    return Point(*speed_up, round(x, 1), not 0 <= share <= 1)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"
