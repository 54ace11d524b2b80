"""The results of a run: one JSON file per GPU and group of workloads, the comparison with an older file, and what has
changed since."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path

import torch

import flash_delta
from flash_delta.testing import Workload
from workshop.bench.entry import Costs, Lengths
from workshop.bench.floor import Ceilings
from workshop.bench.timing import Spread

NOTABLE = 0.05  # a change of a median beyond this is marked
KERNELS = Path(flash_delta.__file__).parent / "kernels"


@dataclass
class Result:
    """One contestant on one workload. Without ``graph_ms`` and ``eager_ms`` there is a ``reason``."""

    workload: Workload
    contestant: str
    reason: str | None = None
    notes: list[str] = field(default_factory=list)  # what else could not be measured
    errors: dict[str, float] = field(default_factory=dict)  # relative L2 against float64
    allowed: dict[str, float] = field(default_factory=dict)
    graph_ms: Spread | None = None
    eager_ms: Spread | None = None
    host_us: Spread | None = None  # of a whole step, over rounds in which the contestants take turns
    first_call_s: float | None = None
    cold: bool = False  # the first call found empty compile caches
    costs: Costs | None = None
    lengths: Lengths | None = None
    floor_ms: float | None = None
    run: str = ""  # when its run started, in UTC; contestants of a row with equal ones took turns

    @property
    def row(self) -> str:
        return row_label(self.workload)

    @property
    def ms(self) -> Spread | None:
        """The time that comparisons use: that of the CUDA graph, if there is one."""
        return self.graph_ms or self.eager_ms

    def over(self, other: "Result") -> float:
        """The time of this result over that of another: of CUDA graphs, or of eager calls if one has no graph."""
        graphs, eager = (self.graph_ms, other.graph_ms), (self.eager_ms, other.eager_ms)
        mine, its = graphs if all(graphs) else eager
        return mine.median / its.median


@dataclass
class Group:
    """The rows of one group of workloads from one run."""

    group: str
    machine: dict[str, str]
    versions: dict[str, str]  # of the contestants
    ceilings: Ceilings | None
    results: list[Result] = field(default_factory=list)
    remark: str = ""  # for readers: if results come from several runs, from which
    kernels: dict[str, str] = field(default_factory=dict)  # digests of their sources, by folder; {}: not noted

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.plain(), indent=1) + "\n")

    def plain(self) -> dict:
        """The group for JSON."""
        return _plain(asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Group":
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.keys() | {"kernels"} != {f.name for f in fields(cls)}:
            raise ValueError(f"results: expected a file that `flash-delta-dev bench` wrote, got {path}")
        return cls.of(data)

    @classmethod
    def of(cls, data: dict) -> "Group":
        """The group that ``plain`` gave. It may change ``data``."""
        tuples = {"graph_ms": Spread, "eager_ms": Spread, "host_us": Spread, "costs": Costs, "lengths": Lengths}
        for result in data["results"]:
            result |= {name: kind(**result[name]) for name, kind in tuples.items() if result.get(name) is not None}
            lengths = tuple(result["workload"].get("lengths", ()))
            result["workload"] = Workload(**result["workload"] | {"lengths": lengths})
        data["results"] = [Result(**result) for result in data["results"]]
        data["ceilings"] = data["ceilings"] and Ceilings(**data["ceilings"])
        return cls(**data)

    def missing(self, workloads: Sequence[Workload]) -> list[Workload]:
        """The workloads that not every contestant has run. Drops the incomplete rows that a broken run left."""
        done = {row for row, results in self.rows().items() if len(results) == len(self.versions)}
        self.results = [result for result in self.results if result.row in done]
        return [workload for workload in workloads if row_label(workload) not in done]

    def rows(self) -> dict[str, list[Result]]:
        """The results by row, in the order in which rows were run."""
        rows: dict[str, list[Result]] = {}
        for result in self.results:
            rows.setdefault(result.row, []).append(result)
        return rows


def row_label(workload: Workload) -> str:
    return f"{workload.kind} {workload.name}"


@dataclass(frozen=True)
class Change:
    row: str
    contestant: str
    old_ms: float | None  # None: the older file has no time
    new_ms: float | None

    @property
    def slower(self) -> bool:
        return self.old_ms is not None and (self.new_ms is None or self.new_ms > self.old_ms * (1 + NOTABLE))

    @property
    def faster(self) -> bool:
        return self.new_ms is not None and (self.old_ms is None or self.new_ms < self.old_ms * (1 - NOTABLE))


def changes(old: Group, new: Group) -> Iterator[Change]:
    """Rows of both groups whose time changed by more than 5 %, is new, or is gone."""
    before = {(r.row, r.contestant): r for r in old.results}
    for result in new.results:
        key = (result.row, result.contestant)
        if key in before:
            was, now = before[key].ms, result.ms
            change = Change(*key, was and was.median, now and now.median)
            if change.slower or change.faster:
                yield change


def digests() -> dict[str, str]:
    """A digest of the Python files of each folder of kernels, as they are now."""
    folders = sorted({file.parent for file in KERNELS.rglob("*.py")} - {KERNELS})
    return {folder.relative_to(KERNELS).as_posix(): _digest(folder) for folder in folders}


def _digest(folder: Path) -> str:
    found = sha256()
    for file in sorted(folder.glob("*.py")):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def changed(group: Group) -> list[str]:
    """The folders of kernels that this group measured and that differ now. None of a group that kept no digests."""
    before, now = group.kernels, digests() if group.kernels else {}
    differ = (name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name))
    return [name for name in differ if any(is_used(name, result.workload) for result in group.results)]


def is_used(folder: str, workload: Workload) -> bool:
    """Whether a call of this workload may launch kernels of a folder, or such that are built of it."""
    names = set(folder.split("/"))
    if "runtime" in names:  # it launches, and what it does takes time in eager calls alone
        return False
    if "elementwise" in names:
        return bool(workload.hidden or workload.around)
    if "serving" in names:
        return workload.kind in ("prefill", "decode")
    if workload.kind == "decode":
        return folder in ("device", "triton")
    if "backward" in names and workload.kind != "training":
        return False
    return ("scalar" if workload.gate == "channel" else "channel") not in names


def folder(device: torch.device) -> str:
    """The name of the device's folder under ``benchmarks/results/``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.lower().replace(" ", "-")


def _plain(value):
    """The value for JSON: named tuples as dictionaries, floats with six digits."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
