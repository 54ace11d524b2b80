"""What kernels hand to their roles. Rings of tiles and their descriptors are `ChunkTiles` (device/load_role.py)."""

from collections import namedtuple
from typing import Any, NamedTuple

# Descriptors of the states, or their gradients, with which scans begin and end, and which programs hand over; of
# outputs; and of the states and U of chunks, if they are saved.
StateDescriptors = namedtuple("StateDescriptors", "initial final handed o states U", defaults=[None] * 3)


class Barriers(NamedTuple):
    """A ring of barriers for each step that one role waits for; None if there is no such step."""

    full: Any  # k, q and rates are there
    v_full: Any  # v is there
    A_full: Any  # A is there
    P_full: Any  # P is there
    done: Any  # the state groups have read all of them
