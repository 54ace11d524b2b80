"""Whether contestants reach the same losses, as far as seeds do.

A[s] is the loss of contestant A with seed s: the mean of one of the PARTS of its training, or that of the held-out text
at its end. R is the first contestant. Two contestants A and B agree if, in the mean over the parts and also for the
held-out text,

    mean over s of |A[s] - B[s]|  <=  max over s of R[s]  -  min over s of R[s]

Each seed has windows of its own, so seeds differ more in training than in the held-out text.
"""

from itertools import combinations
from typing import Any

import numpy as np

PARTS = 20  # of a training: the losses of single steps differ mostly by their windows


def verdict(records: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What was found, from a record for each contestant and seed; seeds in the same order.

    Raises:
        ValueError: if there are fewer than two contestants or seeds, or if records differ in texts or settings.
    """
    _require_one_training(records)
    first = next(iter(records))
    parts = {name: np.array([_parts(r["losses"]) for r in runs]) for name, runs in records.items()}  # [seeds, PARTS]
    ends = {name: np.array([[r["held_out"]] for r in runs]) for name, runs in records.items()}  # [seeds, 1]
    spread = {"training": _spread(parts[first]), "held_out": _spread(ends[first])}
    pairs = []
    for a, b in combinations(records, 2):
        apart = {"training": np.abs(parts[a] - parts[b]).mean(), "held_out": np.abs(ends[a] - ends[b]).mean()}
        pairs.append({
            "contestants": [a, b],
            "difference": {name: float(value) for name, value in apart.items()},
            "right": all(bool(apart[name] <= spread[name]) for name in spread),
        })  # fmt: skip
    run = {name: records[first][0][name] for name in ("settings", "compiled", "device", "versions")}
    seeds = [record["settings"]["seed"] for record in records[first]]
    found = {"spread_of": first, "spread": spread, "pairs": pairs, "right": all(pair["right"] for pair in pairs)}
    speeds = {name: [record["tokens_per_second"] for record in of_seeds] for name, of_seeds in records.items()}
    return found | {"seeds": seeds, "tokens_per_second": speeds, "first_run": run}


def _parts(losses: list[float]) -> list[float]:
    return [float(part.mean()) for part in np.array_split(np.array(losses), PARTS)]


def _spread(x: np.ndarray) -> float:
    """The mean over parts of how far seeds are apart."""
    return float((x.max(0) - x.min(0)).mean())


def _require_one_training(records: dict[str, list[dict[str, Any]]]) -> None:
    seeds = [[run["settings"]["seed"] for run in runs] for runs in records.values()]
    if len(records) < 2 or len(seeds[0]) < 2 or any(seeds[0] != others for others in seeds):
        raise ValueError(f"records: expected two contestants or more, with the same two seeds or more, got {seeds}")
    same = {"seed": None, "dtype": None}  # what may differ
    kinds = {(run["corpus"], *map(str, (run["settings"] | same).values())) for runs in records.values() for run in runs}
    if len(kinds) > 1:
        raise ValueError(f"records: expected one text and the same settings except seeds and dtypes, got {kinds}")
