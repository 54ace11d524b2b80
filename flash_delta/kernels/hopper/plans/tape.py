"""The tape: how the work of a kernel is divided among its programs if whole items would leave some of them idle. The
loops take it, and in the backward pass the scans of whole sequences.

An item is one value head of one sequence. The tape has all items, one after the other. An item is as long as it takes.
Every program gets an interval of the tape, all of the same length

    L = max(longest item, all items / programs)

(McNaughton's wrap-around rule). So a border between two programs may lie inside of an item. The program before the
border scans the first chunks of this item, and does so first of all. The program after the border scans the other
chunks, last of all. In between the state is in memory, in float32, as in registers. So no bit depends on borders
(hand_over.py). No item is longer than L. So the state is usually there in time. A kernel that scans from right to left
counts an item's chunks from the end.

A program waits only for the first piece of the program before it. That piece waits for nobody. Programs take their
numbers in the order in which they start. So all programs end, even if few of them run at a time.

`lay` runs as one program, on the device, since only the device may know the lengths. It writes the table:

    0                   the number of the program that starts next
    1                   how often a program looks for a state before it gives up
    2                   the address of a word of the host: a program has given up (lost.py)
    3 ..                programs + 1 borders: the item that begins at the border or lies around it, and how many of its
                        chunks are before the border
    2 programs + 5 ..   two flags per program, one for each half of the value columns: it has handed its state over

and ``marks``, which only `lay` reads: how long everything before each sequence is."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, follow, lead
from flash_delta.kernels.hopper.plans.lost import word_of
from flash_delta.kernels.hopper.plans.tiles import (
    CHANNEL_PACE,
    SLIM,
    WIDE,
    Pace,
    count_programs,
    pool_loops,
)
from flash_delta.kernels.runtime.arguments import launch_rule
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.problem import Problem

PATIENCE = 2**24  # looks, of about a microsecond each
PROGRAMS = (
    256  # a power of two above the multiprocessors of any chip of this kind, of which compiled code knows nothing
)
NUMBERS = ["programs", "word", "patience", "chunk_ticks", "item_ticks", "cut_ticks"]


class Tape(NamedTuple):
    """The memory of a tape, and the arguments of a kernel for NUMBERS."""

    table: Layout
    marks: Layout
    handed: Layout  # the states that are handed over, one per program; then those that parts of prompts start from
    numbers: tuple[int, ...]

    @property
    def programs(self) -> int:
        return self.numbers[0]


def new_tape(made: Making, p: Problem, programs: int, pace: Pace, starts: int = 0, name: str = "tape") -> Tape:
    """Memory for a tape of so many programs. ``starts``: how many sequences there may be in addition, since parts count
    as sequences."""
    table = made.new(f"table of {name}", (4 * programs + 5,), torch.int64)
    marks = made.new(f"marks of {name}", (p.N + starts + 1,), torch.int32)
    handed = made.new(f"handed on {name}", ((programs + starts * p.HV) * p.V, p.K), torch.float32)
    return Tape(table, marks, handed, (programs, word_of(p.device), PATIENCE, *pace))


def new_pool_tape(made: Making, p: Problem, chip: Chip, starts: int) -> Tape:
    """Memory for the tape of `run_pool_loops`. Programs of NARROW have none, since there is one for every item."""
    t = SLIM if p.K == 64 else WIDE
    programs = count_programs(p, chip, t, pool_loops(p, chip, every=False, starts=starts)[-1].sequences)
    return new_tape(made, p, programs, t.pace.on_pool(p), starts)


def new_channel_tape(made: Making, p: Problem, chip: Chip, sequences: int) -> Tape:
    """Memory for the tape of the loop with a decay per channel, with a whole state per program."""
    pace = CHANNEL_PACE if p.pools is None else CHANNEL_PACE.on_pool(p)
    return new_tape(made, p, min(sequences * p.HV, chip.processors), pace)


@triton.jit
def count_chunks(n, known, cu_seqlens, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """The chunks of sequences n, and 0 for those that are not ``known``."""
    start, stop, _ = bounds(n, cu_seqlens, N, T, C, PACKED)
    return tl.where(known, (stop - start + C - 1) // C, 0)


@triton.jit
def lay(
    table, marks, numbers, cu_seqlens, prompts, parts, N, T, HV, C: tl.constexpr, PACKED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``numbers``: those of NUMBERS. ``prompts``: the sequences on a pool, or None. ``parts``: which parts of them
    (prompt_list.py), or None. PROGRAMS: a power of two above the number of programs.

    If bounds are wrong, sequences may seem to have more tokens than there are. Those have no length here, so that
    numbers stay below 2^31. The loop finds the chunks of a sequence by itself, and never scans more of them."""
    programs, word, patience, chunk_ticks, item_ticks, cut_ticks = numbers
    count = N
    if prompts is not None:
        tl.debug_barrier()  # the list is there
        count = tl.load(prompts)
    total, longest, shortest, found = N * 0, N * 0, N * 0 + 2**30, N * 0
    most = T // C + N if PACKED else N * ((T + C - 1) // C)
    for i in range(0, count, 128):
        at = i + tl.arange(0, 128)
        known = at < count
        n = tl.minimum(at, count - 1)
        if parts is not None:
            part = parts + 5 * n + 2
            chunks = tl.load(part + 1, mask=known, other=0) - tl.load(part, mask=known, other=0)
        else:
            if prompts is not None:
                n = tl.load(prompts + 3 * n + 1)
            chunks = count_chunks(n, known, cu_seqlens, N, T, C, PACKED)
        upto = found + tl.cumsum(chunks, 0)
        chunks = tl.minimum(upto, most) - tl.minimum(upto - chunks, most)
        found = tl.minimum(found + tl.sum(chunks, 0), most)
        ticks = tl.where(known, item_ticks + chunk_ticks * chunks, 0)
        tl.store(marks + at, total + (tl.cumsum(ticks, 0) - ticks) * HV, mask=known)
        total += tl.sum(ticks, 0) * HV
        longest = tl.maximum(longest, tl.max(ticks, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(known, ticks, 2**30), 0))
    tl.store(marks + count, total)
    items, share = count * HV, tl.cdiv(total, programs)
    length = tl.maximum(tl.maximum(longest, share), 1)
    rounds = tl.cdiv(items, programs) * longest
    if (shortest == longest) & (rounds - rounds // 32 <= share + cut_ticks):
        length = tl.maximum(rounds, 1)  # as in `needs_tape`
    tl.debug_barrier()  # all marks are there
    u = tl.arange(0, PROGRAMS)
    x = tl.minimum(u.to(tl.int64) * length, total).to(tl.int32)
    low, high = u * 0, u * 0 + tl.maximum(count - 1, 0)
    left = count
    while left > 0:  # finds the last sequence that begins at x or before
        middle = (low + high + 1) // 2
        below = tl.load(marks + middle, mask=middle < count, other=2**31 - 1) <= x
        low, high = tl.where(below, middle, low), tl.where(below, high, tl.maximum(middle - 1, low))
        left = left // 2
    begin = tl.load(marks + low, mask=low < count, other=0)
    ticks = tl.maximum((tl.load(marks + low + 1, mask=low < count, other=0) - begin) // HV, 1)
    head = tl.minimum((x - begin) // ticks, HV - 1)
    into, chunks = x - begin - head * ticks, (ticks - item_ticks) // chunk_ticks
    nearly_all = (ticks - into < chunk_ticks) & (into > 0)
    item = low * HV + head + nearly_all.to(tl.int32)
    nothing = (into < item_ticks + chunk_ticks) | nearly_all | (chunks < 2)
    cut = tl.minimum(tl.maximum((into - item_ticks + chunk_ticks // 2) // chunk_ticks, 1), chunks - 1)
    item, cut = tl.where(x >= total, items, item), tl.where((x >= total) | nothing, 0, cut)
    if items <= programs:  # one each
        item, cut = tl.minimum(u, items), u * 0
    tl.store(table + 3 + 2 * u, item, mask=u <= programs)
    tl.store(table + 4 + 2 * u, cut, mask=u <= programs)
    tl.store(table + 5 + 2 * programs + u, u * 0, mask=u < programs)
    tl.store(table + 5 + 3 * programs + u, u * 0, mask=u < programs)
    tl.store(table, 0)
    tl.store(table + 1, patience)
    tl.store(table + 2, word)


@triton.jit(do_not_specialize=["N", "T", "HV", *NUMBERS])
def lay_tape(
    table, marks, cu_seqlens, programs, word, patience, chunk_ticks, item_ticks, cut_ticks, N, T, HV,
    C: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr, PROGRAMS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Lays the tape beside `rates`, if that kernel runs (FOLLOWS). It reads nothing that `rates` writes. But the loop
    waits for this kernel only, so it waits for `rates`, too, at its end."""
    lead(OVERLAP)
    numbers = (programs, word, patience, chunk_ticks, item_ticks, cut_ticks)
    lay(table, marks, numbers, cu_seqlens, None, None, N, T, HV, C, PACKED, PROGRAMS)
    follow(FOLLOWS and OVERLAP)


def run_lay_tape(c: Draft, tape: Tape, *, follows: bool) -> None:
    """``follows``: `rates` has just been launched."""
    pointers = tape.table, tape.marks, c.x.cu_seqlens
    own = {"PROGRAMS": PROGRAMS, "FOLLOWS": follows}
    launch_rule(c, lay_tape, pointers, (1, 1, 1), Tile(4, 1), *tape.numbers, c.p.N, c.p.T, follows=follows, **own)
