"""The chart of speed beside each peer, with which the README and the page of benchmarks begin."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from textwrap import wrap
from typing import NamedTuple

from flash_delta.page import render
from workshop.bench.contestants import AGAIN, OURS, PLAIN
from workshop.bench.results import Group
from workshop.bench.tables import APART, apart

OWN_CODE = "transformers"  # the peer that has no kernels
TITLE = f"Speed of {OURS} against each peer"
READING = (
    "Each circle is one shape that both run. It is hollow if the two times come from different runs. "
    "A bar is the geometric mean, which stands on the right. A triangle lies beyond the axis. "
    f"{OWN_CODE} is its own PyTorch code."
)
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
LEFT, RIGHT = 212.0, 420.0  # of the axis
TOP, LINE, GAP = 150.0, 20.0, 9.0  # the middle of the first line, the height of each, and the space between groups
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
    """One peer on the chart."""

    peer: str
    y: float
    points: list[Point]
    mean: Point
    label: str


Peers = dict[str, list[SpeedUp]]


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


def speed_ups(group: Group) -> dict[str, Peers]:
    """The speed-ups by kind of row and by peer."""
    found: dict[str, Peers] = {}
    for kind, peers in compared(group):
        for peer, speed_up in peers.items():
            found.setdefault(kind, {}).setdefault(peer, []).append(speed_up)
    return found


def mean(found: list[SpeedUp]) -> SpeedUp:
    return SpeedUp(geometric_mean(s.ratio for s in found), any(s.apart for s in found))


def named_speed_ups(groups: Sequence[Group]) -> dict[str, Peers]:
    """The speed-ups by the chart's names for groups and kinds."""
    return {name: speed_ups(group)[kind] for group, kind, name in _named(groups)}


def _named(groups: Sequence[Group]) -> Iterator[tuple[Group, str, str]]:
    """Yields every kind of rows that the chart shows, with its name."""
    several = len({device([group]) for group in groups}) > 1
    for group in _drawn(groups):
        kinds = speed_ups(group)
        for kind in kinds:
            name = NAMES[group.group] + (f" {kind}" if len(kinds) > 1 else "")
            yield group, kind, f"{name}, {short(group)}" if several else name


def summary(groups: Sequence[Group]) -> Iterator[list[str]]:
    """README's table: a line for every kind of every group, against the best peer of each row. On a GPU it leaves out
    kinds that only transformers' own PyTorch code ran."""
    for group, kind, name in _named(groups):
        name = name.removesuffix(f", {short(group)}")
        rows = [peers for this, peers in compared(group) if this == kind]
        beside = list(dict.fromkeys(peer for peers in rows for peer in peers))
        if beside == [OWN_CODE] and group.machine.get("gpu"):
            continue
        best = [min(peers.values()) for peers in rows]
        low, high, middle = min(best).ratio, max(best).ratio, mean(best)
        spread = f" ({_times(low)} to {_times(high)})" if len(best) > 1 else ""
        ahead = Counter(peer for peers in rows for peer, speed_up in peers.items() if speed_up.ratio < 1)
        slower = [f"{peer} in {count} of {len(rows)}" for peer, count in ahead.items()]
        yield [
            name, f"{short(group)}, {group.versions[OURS]}", ", ".join(beside),
            f"{_times(middle.ratio)}{spread}{f' {APART}' * middle.apart}", ", ".join(slower) or "none",
        ]  # fmt: skip


def in_words(groups: Sequence[Group]) -> str:
    """The chart in words, for readers who cannot see it."""
    said = [
        f"{name}: " + ", ".join(f"{peer} {_times(mean(found).ratio)}" for peer, found in peers.items())
        for name, peers in named_speed_ups(groups).items()
    ]
    return "; ".join(said)


def _drawn(groups: Sequence[Group]) -> list[Group]:
    """The groups that the chart has a name for."""
    return [group for group in groups if group.group in NAMES]


def chart(groups: Sequence[Group], scheme: str) -> str:
    """The groups that have names here, as an SVG drawing, for a light or a dark page."""
    groups, y, blocks = _drawn(groups), TOP, []
    for name, peers in named_speed_ups(groups).items():
        lines = [_line(peer, found, y + LINE * i) for i, (peer, found) in enumerate(peers.items())]
        blocks.append((name, lines))
        y += LINE * len(peers) + GAP
    versions: dict[str, set[str]] = {}
    for group in groups:
        for name, version in group.versions.items():
            versions.setdefault(name, set()).update(version.split(" and "))  # rows of one group may be of two versions
    versions = {name: found for name, found in versions.items() if name not in AGAIN}
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
        blocks=blocks,
        top=TOP,
        bottom=y - GAP,
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


def _line(peer: str, found: list[SpeedUp], y: float) -> Line:
    middle = mean(found)
    return Line(peer, y, [_point(speed_up) for speed_up in found], _point(middle), _times(middle.ratio))


def _point(speed_up: SpeedUp) -> Point:
    """The point on the logarithmic axis. Values beyond its end are drawn at the end."""
    share = math.log(speed_up.ratio / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
    x = LEFT + (RIGHT - LEFT) * min(max(share, 0.0), 1.0)
    return Point(*speed_up, round(x, 1), not 0 <= share <= 1)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"
