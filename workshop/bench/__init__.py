"""How fast this library and its peers are: what ``flash-delta-dev bench`` and ``flash-delta-dev report`` do."""

from workshop.bench.contestants import taking_part, versions
from workshop.bench.floor import ceilings
from workshop.bench.peer import Peer
from workshop.bench.results import Change, Group, Result, changed, changes, digests, folder
from workshop.bench.runner import run_group
from workshop.bench.selection import few, select

__all__ = [
    "Change",
    "Group",
    "Peer",
    "Result",
    "ceilings",
    "changed",
    "changes",
    "digests",
    "few",
    "folder",
    "run_group",
    "select",
    "taking_part",
    "versions",
]
