"""The JSON files under ``benchmarks/results/``, and how their numbers are printed."""

import json
import math
from pathlib import Path
from typing import Any

from workshop.bench.results import Group, Result

H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"


class Results:
    """The results of this folder, by file."""

    def __init__(self, folder: Path):
        self.folder = folder

    def json(self, file: str) -> Any:
        return json.loads((self.folder / file).read_text())

    def row(self, file: str, row: str, contestant: str = "flash_delta") -> Result:
        """One contestant's result on one row of a group, for instance "cpu/cpu.json" and "forward 4/8 1x512"."""
        return next(r for r in self.group(file).rows()[row] if r.contestant == contestant)

    def group(self, file: str) -> Group:
        return Group.read(self.folder / file)


def two_digits(ratio: float) -> str:
    return f"{ratio:.2f}"


def at_most(value: float, digits: int) -> str:
    """The least number of so many digits that the value does not exceed."""
    return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"


def ends(values: list[float], digits: int = 2) -> tuple[str, str]:
    """The least and the greatest of these numbers."""
    return f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
