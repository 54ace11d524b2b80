"""Finds the sequences of a prefill that the loop scans. One program of `rates` does this on the device. The loop scans
sequences that are not padding and have more than SHORT tokens. `decode` runs the shorter ones. With SHORT 0 it runs
none. Long sequences are cut into parts, which are scanned at the same time (scalar/segments/).

With a decay per channel there is no `rates`, and `list_prompts` does this instead. It also lays the tape, and writes
zeros to o of padding and after the last sequence. Its grid is (slots), and a program looks at one chunk of all heads.
"""

import torch
import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds, count_slots, find_chunk, lead, rows_of, store_tile
from flash_delta.kernels.device.slots import load_slots
from flash_delta.kernels.hopper.plans.tape import NUMBERS as OF_TAPE
from flash_delta.kernels.hopper.plans.tape import PROGRAMS, Tape, lay
from flash_delta.kernels.runtime.arguments import launch_rule, table
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft, Layout, Making
from flash_delta.problem import Problem, Slots

NUMBERS = ["N", "T", "slots", "null_slot", "read_row", "write_row", "has_row", "HV", *OF_TAPE]
INDICES = ["read_indices", "write_indices", "has_initial_state"]  # as in `decode`


@triton.jit
def find_slots(tables, n, slots):
    """The slots that sequences n read and write (-1: none), and which sequences are not padding, as in `scan`. Without
    tables sequence n has slot n. It reads nothing if there are no slots.

    tables: indices of slots to read and to write, flags of initial states, and the strides of these three.
    slots: as `as_slot` takes it."""
    read_indices, write_indices, has_initial_state, read_row, write_row, has_row = tables
    if read_indices is None:
        return tl.where(n < slots[0], n, -1), n, n >= 0
    read, stored, write, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
    )
    if write_indices is None:
        write = n * 0 - 1
    return tl.where(stored, read, -1), write, well


@triton.jit
def cut_prompt(tokens, shortest, fewest, most, C: tl.constexpr):
    """The parts of a prompt, the chunks of a part, and those of the prompt (scalar/segments/cut.py)."""
    whole, chunks = tokens // C, (tokens + C - 1) // C
    number = tl.where(whole >= shortest, tl.minimum(whole // fewest, most), 1)
    length = tl.maximum((chunks + number - 1) // number, 1)
    return tl.maximum((chunks + length - 1) // length, 1), length, chunks


@triton.jit
def write_prompt_list(
    prompts, parts, tables, cu_seqlens, N, T, slots, cutting, HV, C: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """Writes how many prompts, or parts of prompts, the loop scans. For each of them it writes three numbers: the
    sequence, the slot that its state is read from, and the slot that its state is written to. If there is no such slot,
    the number is -1.

    parts: where the list of parts goes, or None if no prompt is cut. It begins with two numbers: of starts, which are
    the states that parts start from, and of prompts that are cut. Five numbers follow for each part: its first chunk in
    the prompt, the chunk after its last, and the number of its start's first head in memory, or -1 for a prompt that is
    not cut. The fourth of the numbers of part s is the part of start s. The fifth of part i is the first start of the
    i-th prompt that is cut. The first part has a start, too. The last part may be scanned before it, and may write to
    the slot that the prompt reads.
    cutting: how prompts are cut (the three numbers of `cut_prompt`), how many starts there is room for, and how many
    other states there are before them in memory."""
    count, starts, several = N * 0, N * 0, N * 0
    for i in range(0, N, 128):
        at = i + tl.arange(0, 128)
        n = tl.minimum(at, N - 1)
        start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
        first, last, well = find_slots(tables, n, slots)
        if SHORT > 0:
            well = well & (stop - start > SHORT)
        listed = (well & (at < N)).to(tl.int32)
        if parts is None:
            to = prompts + 3 * (count + tl.cumsum(listed, 0) - listed) + 1
            tl.store(to, n, mask=listed != 0)
            tl.store(to + 1, first, mask=listed != 0)
            tl.store(to + 2, last, mask=listed != 0)
            count += tl.sum(listed, 0)
        else:
            shortest, fewest, most, room, before = cutting
            number, length, chunks = cut_prompt(stop - start, shortest, fewest, most, C)
            begun = tl.where(number > 1, number * listed, 0)
            # If bounds are wrong, there may be no room. Then prompts are not cut.
            begun = tl.where(starts + tl.cumsum(begun, 0) <= room, begun, 0)
            number, length = tl.maximum(begun, listed), tl.where(begun > 0, length, chunks)
            own, s = count + tl.cumsum(number, 0) - number, starts + tl.cumsum(begun, 0) - begun
            for j in range(tl.max(number, 0)):
                known, m = j < number, own + j
                to = prompts + 3 * m + 1
                tl.store(to, n, mask=known)
                tl.store(to + 1, tl.where(j == 0, first, -1), mask=known)
                tl.store(to + 2, tl.where(j == number - 1, last, -1), mask=known)
                to = parts + 5 * m + 2
                tl.store(to, j * length, mask=known)
                tl.store(to + 1, tl.minimum((j + 1) * length, chunks), mask=known)
                tl.store(to + 2, tl.where(begun > 0, before + (s + j) * HV, -1), mask=known)
                tl.store(parts + 5 * (s + j) + 5, m, mask=j < begun)
            cuts = (begun > 0).to(tl.int32)
            tl.store(parts + 5 * (several + tl.cumsum(cuts, 0) - cuts) + 6, s, mask=cuts > 0)
            count += tl.sum(number, 0)
            starts += tl.sum(begun, 0)
            several += tl.sum(cuts, 0)
    tl.store(prompts, count)
    if parts is not None:
        tl.store(parts, starts)
        tl.store(parts + 1, several)


@triton.jit
def is_short(n, cu_seqlens, N, T, SHORT: tl.constexpr):
    """Whether `decode` runs sequence n. The tokens after the last sequence are not a sequence."""
    start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
    return (n < N) & (stop - start <= SHORT)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def list_prompts(
    cu_seqlens, o, prompts, read_indices, write_indices, has_initial_state, table, marks, programs, word, patience,
    chunk_ticks, item_ticks, cut_ticks, N, T, slots, null_slot, read_row, write_row, has_row, HV,
    V: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr, SHORT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot = tl.program_id(0)
    tables = (read_indices, write_indices, has_initial_state, read_row, write_row, has_row)
    slots = (slots, null_slot)
    if slot == 0:
        write_prompt_list(prompts, None, tables, cu_seqlens, N, T, slots, None, HV, C, SHORT)
        numbers = (programs, word, patience, chunk_ticks, item_ticks, cut_ticks)
        lay(table, marks, numbers, cu_seqlens, prompts, None, N, T, HV, C, True, PROGRAMS)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, True)
    if (token >= stop) | is_short(n, cu_seqlens, N, T, SHORT):
        return
    _, _, well = find_slots(tables, tl.minimum(n, N - 1), slots)
    if (n < N) & (well != 0):
        return
    strides = (T.to(tl.int64) * HV * V, HV * V, V, 1)
    zeros = tl.zeros([C, V], o.dtype.element_ty)
    for hv in range(HV):
        store_tile(rows_of(o, strides, row, row + hv), strides, zeros, token, stop, 0, V, C, V)


def new_prompt_list(made: Making, p: Problem, starts: int = 0) -> Layout:
    """Memory for the list of sequences that the loop scans on a pool. ``starts``: how many parts of them there may be,
    if they are cut."""
    return made.new("prompts", (1 + 3 * (p.N + starts),), torch.int32)


def run_list_prompts(c: Draft, o: Layout, prompts: Layout, tape: Tape, s: Slots) -> None:
    p, tables = c.p, (s.read_indices, s.write_indices, s.has_initial_state)
    launch_rule(
        c, list_prompts, (c.x.cu_seqlens, o, prompts, *tables, tape.table, tape.marks), (count_slots(p), 1, 1),
        Tile(4, 1), *tape.numbers, p.N, p.T, s.state_pool.shape[0], p.pools.null_slot, *(table(t)[0] for t in tables),
        PROGRAMS=PROGRAMS,
    )  # fmt: skip
