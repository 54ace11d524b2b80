"""The launch numbers of the loop and of the scan in segments.

A multiprocessor has 227 KB of shared memory. For each thread of a warp group it has 512 registers, which the program's
warp groups share. Other tiles than these fail the compile gate or do not fit."""

from typing import NamedTuple

import torch

from flash_delta.kernels.device.chunk import C
from flash_delta.kernels.runtime import chip as triton
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.pool_launches import PoolLaunch, pool_launches
from flash_delta.problem import Problem


class Pace(NamedTuple):
    """About how long a program of a kernel takes on an H200, in quarters of a microsecond. Plans are made from these
    numbers (plan.py), and the tape is divided by them (tape.py), which changes no bit of a result."""

    chunk: int
    item: int = 12  # besides its chunks
    cut: int = 28  # handing a state over

    def time(self, chunks: int) -> int:
        """The time of an item of so many chunks."""
        return self.item + chunks * self.chunk

    def on_pool(self, p: Problem) -> "Pace":
        """The pace on a pool, where an item also loads and stores a state in a slot. With heads of 64 this takes no
        longer."""
        return self._replace(item=self.item + 20 * (p.K // 128))


class LoopTile(NamedTuple):
    groups: int  # state groups: warp groups with 64 value columns of a state each
    factors: int  # factor groups: warp groups that factor chunks, in turns
    slots: int  # slots in the ring of q, k and rates
    values: int  # slots in the ring of v
    maps: int  # slots in the ring of A and P
    outputs: int  # buffers of o per state group
    registers: int  # for each of two state groups, or of two factor groups; the other group gets the rest
    pace: Pace


WIDE, NARROW = LoopTile(2, 1, 4, 2, 2, 1, 200, Pace(10)), LoopTile(1, 2, 4, 3, 2, 2, 136, Pace(7))
SLIM = LoopTile(1, 2, 4, 4, 4, 1, 144, Pace(6))  # for heads of 64: one warp group has a whole state
# What is saved for every chunk (SAVE in loop.py) goes to memory through o's buffers. So there are more of these, and
# fewer slots in other rings. WIDE has neither the memory nor the registers for this (Triton 3.9: C7512).
SAVING = {64: LoopTile(1, 2, 4, 4, 4, 4, 144, Pace(7)), 128: LoopTile(1, 2, 4, 2, 2, 3, 128, Pace(9))}
RATES = triton.Tile(1, 3)  # `rates` with gates only
RATES_OF_ROWS = triton.Tile(4, 3)  # also with whole rows: of q and k for norms, or wide rows of zeros


def compose_tile(p: Problem, chip: Chip) -> triton.Tile:
    """The tile of `compose_maps`. Every program of a head reads all maps of the head. So programs have 32 columns if
    there would be more programs of 16 columns than multiprocessors."""
    return triton.Tile(8, 3, 32) if 16 * chip.processors < p.HV * p.V else triton.Tile(4, 3, 16)


def count_programs(p: Problem, chip: Chip, t: LoopTile, sequences: int) -> int:
    """The number of programs of the loop per block of value columns, for so many sequences."""
    return min(sequences * p.HV, max(1, chip.processors * 64 * t.groups // p.V))


def needs_tape(p: Problem, programs: int, pace: Pace) -> bool:
    """Whether programs share items (tape.py). They do so if there are more items than programs, unless the host knows
    that whole rounds of equal items take hardly longer: 3 %, and the time of a cut."""
    items, chunks = p.N * p.HV, p.N * -(-p.T // C) if not p.packed else p.T // C + p.N
    if items <= programs or pace.item * items + pace.chunk * chunks * p.HV >= 2**31:
        return False
    if p.packed and p.lengths is None:
        return True
    ticks = [pace.item + pace.chunk * -(-n // C) for n in (p.lengths or (p.T,))]
    share, rounds = sum(ticks) * items // (len(ticks) * programs), -(-items // programs) * ticks[0]
    return min(ticks) < max(ticks) or rounds - rounds // 32 > share + pace.cut


def backward_needs_tape(p: Problem, programs: int, pace: Pace) -> bool:
    """Whether programs share items in a scan that otherwise has a program for every item. Without the tape, a program
    starts when another one ends. So many unequal items are divided well, and the tape loses 3 % (nine items per
    program, on an H200)."""
    equal = not p.packed or (p.lengths is not None and len(set(p.lengths)) == 1)
    return needs_tape(p, programs, pace) and (equal or SCANNED_IN_TURNS * programs >= p.N * p.HV)


def pool_loops(p: Problem, chip: Chip, *choice: LoopTile, every: bool, starts: int) -> tuple[PoolLaunch, ...]:
    """The launches of the loop on a pool. Both tiles give the same bits (test_prefill_gpu.py). ``starts``: how many
    parts of prompts there may be. Each counts as a prompt."""
    choices = choice or ((SLIM,) if p.K == 64 else (WIDE, NARROW) if every else ())
    if choices:
        return tuple(PoolLaunch(t, max(1, p.N + starts)) for t in choices)
    fitting = (NARROW, WIDE) if chip.processors >= 2 * p.HV else (WIDE,)
    return pool_launches(p, chip, fitting, lambda _: 2 * p.HV, starts)


BY_HAND = triton.Tile(4, 3)  # of kernels in Gluon. They take no other number from a tile than warps
WHOLE = 256  # heads of this width do not fit the loop; `factor_chunks` runs first, then a scan of whole sequences

# The kernels of a scan in segments.
FACTOR, FACTOR_PROGRAMS = BY_HAND._replace(registers=128), 4  # so many programs share a multiprocessor
MEMBERS = 2  # most value heads per program of `factor_chunks`; they share k
MAPS = {"NS": 4, "REGISTERS": 216}
PADDING, PADDING_ROWS = triton.Tile(4, 1), 32  # rows of a program that copies heads to another width
# By the width of heads.
SEGMENT_SCANS = {64: {"NS": 4, "REGISTERS": 200}, 128: {"NS": 3, "REGISTERS": 192}, 256: {"NS": 2, "REGISTERS": 256}}

# With a decay per channel.
PREPARES = 2  # programs per multiprocessor
CHANNEL_SCAN = {"NS": 3, "NV": 2, "NO": 2}
CHUNK_BACK = BY_HAND._replace(warps=8)


class ChannelTile(NamedTuple):
    HALVES: int  # how many halves of a state's value columns a program has
    GATES: int  # registers of the role that gates
    FACTORS: int  # and of the role that factors; the role that carries the state gets the rest


def channel_rings(p: Problem) -> dict[str, int]:
    """The rings of the loop. Gates in float32 leave memory for two slots of keys only, and so do the tiles of b and w,
    which also take a slot from the values."""
    few = p.gate.dtype == torch.float32 or p.channel_strength
    return {"NR": 2 if few else 3, "NV": 2 if p.channel_strength else 3, "NX": 3, "NO": 2}


CHANNEL_WHOLE, CHANNEL_HALF = ChannelTile(2, 128, 104), ChannelTile(1, 168, 136)
CHANNEL_PACE, CHANNEL_HALF_PACE, CHANNEL_SCAN_PACE = Pace(19, 14), Pace(16, 14), Pace(6)

# The backward pass. RETRACE is `scan_segments` without outputs.
RETRACE = {"NS": 4, "REGISTERS": 216}
SCAN_GRADIENTS = {64: {"REGISTERS": 160}, 128: {"REGISTERS": 144}}  # for each state group
FINE_SCAN_GRADIENTS = {64: {"REGISTERS": 160}, 128: {"REGISTERS": 152}}  # where beta can pass 1
RETRACE_PACE, SCAN_GRADIENTS_PACE = (
    {64: Pace(3), 128: Pace(6)},
    {64: Pace(18, 16), 128: Pace(38, 16)},
)  # whole sequences
SCANNED_IN_TURNS = 4  # items per program
FIND_ENDS = {64: {"REGISTERS": 160}, 128: {"REGISTERS": 216}}  # the same kernel without its gradient role
FINISH, SUM_HEADS = triton.Tile(4, 3), triton.Tile(8, 3)
