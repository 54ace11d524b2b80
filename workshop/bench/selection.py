"""Which workloads a run of the benchmark times."""

from collections.abc import Sequence

import torch

from flash_delta.testing import Workload
from workshop.bench.workloads import GROUPS, WORKLOADS

# For a report of a machine: groups and names of rows.
FEW = {
    ("gdn-prefill", "16/32 1x8192"),
    ("gdn-training", "16/32 1x8192"),
    ("kda-forward", "32/32 1x8192"),
    ("kda-training", "32/32 1x8192"),
    ("decode", "16/32 batch 32"),
    ("kda-decode", "32/32 batch 32"),
    ("cpu", "4/8 1x512"),
    ("cpu", "4/8 batch 1"),
}


def few(device: torch.device) -> list[Workload]:
    """A row of each kind that this device runs."""
    on_cpu = device.type == "cpu"
    return [w for w in WORKLOADS if (w.group, w.name) in FEW and (w.group == "cpu") == on_cpu]


def select(groups: Sequence[str] | None, device: torch.device, rows: str | None = None) -> dict[str, list[Workload]]:
    """The workloads by group: the named groups, or all for this device. ``rows``: text that names of rows contain."""
    for name in groups or ():
        if name not in GROUPS:
            raise ValueError(f"groups: expected names among {', '.join(GROUPS)}, got {name!r}")
    here = [name for name in GROUPS if (name == "cpu") == (device.type == "cpu")]
    chosen = {name: [w for w in WORKLOADS if w.group == name and (rows or "") in w.name] for name in groups or here}
    if not any(chosen.values()):
        raise ValueError(f"rows: expected a part of a row's name, such as {WORKLOADS[0].name!r}, got {rows!r}")
    return {name: workloads for name, workloads in chosen.items() if workloads}
