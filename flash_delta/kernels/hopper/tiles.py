"""The launch numbers of the loop, for what a multiprocessor has: 227 KB of shared memory, and 512 registers per thread
to share out among the warp groups of a program. Others fail the compile gate, or do not fit."""

from typing import NamedTuple

from flash_delta.kernels.triton.tiles import Chip
from flash_delta.problem import Problem


class Tile(NamedTuple):
    groups: int  # warp groups with 64 value columns of a state each
    factors: int  # warp groups that factor chunks, in turns
    slots: int  # of the ring of q, k and rates
    values: int  # of the ring of v
    maps: int  # of the ring of A and P
    outputs: int  # buffers of o, per warp group with a state
    registers: int  # of each group with a state, or if there is one only, of each that factors; another gets the rest


WIDE, NARROW = Tile(2, 1, 4, 2, 2, 1, 192), Tile(1, 2, 4, 2, 3, 1, 136)


def choose(p: Problem, chip: Chip) -> Tile:
    """Half a state per program as long as all can run at once: 2.0 us a chunk on an H200, for 3.2 with a whole one."""
    programs = 2 * p.N * p.HV
    return NARROW if programs <= chip.processors else WIDE
