"""How fast this library and its peers are: what ``flash-delta bench`` and ``flash-delta report`` do."""

from flash_delta.bench.contestants import taking_part, versions
from flash_delta.bench.floor import ceilings
from flash_delta.bench.peer import Peer, PeerAnswer
from flash_delta.bench.results import Change, Group, Result, changes, folder, machine
from flash_delta.bench.runner import run_group
from flash_delta.bench.workloads import select

__all__ = [
    "Change",
    "Group",
    "Peer",
    "PeerAnswer",
    "Result",
    "ceilings",
    "changes",
    "folder",
    "machine",
    "run_group",
    "select",
    "taking_part",
    "versions",
]
