"""The launch numbers of the loop, for what a multiprocessor has: 227 KB of shared memory, and 512 registers per thread
to share out among the warp groups of a program. Others fail the compile gate, or do not fit."""

from typing import NamedTuple

from flash_delta.kernels.triton import tiles as triton
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


WIDE, NARROW = Tile(2, 1, 4, 2, 2, 1, 200), Tile(1, 2, 4, 3, 2, 2, 136)
SLIM = Tile(1, 2, 4, 4, 4, 1, 144)  # of heads of 64: a whole state in one warp group
RATES, RATES_OF_ROWS = (
    triton.Tile(1, 3),
    triton.Tile(4, 3),
)  # `rates` of gates alone, and with rows: norms, or wide ones of zeros


def tiles(p: Problem, chip: Chip, *, every: bool) -> tuple[Tile, ...]:
    """Half a state per program as long as all can run at once: 1.8 us a chunk on an H200, for 3.1 with a whole one.

    ``every``: all that other numbers of states choose.
    """
    if p.K == 64:
        return (SLIM,)
    if every:
        return WIDE, NARROW
    programs = 2 * p.N * p.HV
    return (NARROW if programs <= chip.processors else WIDE,)


# Of the kernels of a walk in segments.
FACTOR = {"maxnreg": 128}  # four programs share a multiprocessor
MEMBERS = 2  # value heads at most that it walks for one k
MAPS = {"NS": 4, "REGISTERS": 216}
COMPOSE = triton.Tile(8, 3, 16)
WALKS = {128: {"NS": 3, "REGISTERS": 192}, 256: {"NS": 2, "REGISTERS": 256}}  # by the width of heads
