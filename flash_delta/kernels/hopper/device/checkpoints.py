"""Finds which states of a sequence are stored in slots of a pool, for the loops.

Roles get everything that they need for it as one tuple, ``kept``: the table of slots, NUMBERS, and then the offsets if
there are any. It is None if there are no checkpoints.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.layouts import C
from flash_delta.kernels.runtime.arguments import checkpoint_table, count_checkpoints
from flash_delta.problem import Problem, Slots

NUMBERS = ["slots", "null_slot", "columns", "interval", "checkpoint_row", "checkpoint_column"]
POINTERS = ["checkpoints", "offsets"]
NONE = (None, None, *(0 for _ in NUMBERS))  # the arguments of a kernel without checkpoints


@gluon.jit
def find_offset(kept, n, length, STEP: gl.constexpr = C):
    """The number of tokens, in whole chunks, after which a scan leaves the checkpoint of sequence n at an offset. 0 if
    it leaves none (triton/serving/offsets.py), or if there are no offsets. STEP: tokens that the scan takes at a
    time."""
    tokens = n * 0
    if kept is not None and len(kept) > 7:
        row, offsets = kept[6], kept[7]
        offset = gl.load(offsets + n.to(gl.int64) * row)
        if (offset >= 0) & (offset <= length):
            tokens = offset.to(gl.int32) // C * C
            if offset == length:
                tokens = (length + STEP - 1) // STEP * STEP
    return tokens


@gluon.jit
def find_checkpoint(kept, n, tokens, length, offset):
    """The slot for the state of sequence n after so many ``tokens``, or -1 if it is not wanted. ``offset``: the result
    of `find_offset`."""
    table, slots, null, columns, interval, row, column = kept[:7]
    slot = n * 0 - 1
    if len(kept) > 7:
        if tokens == offset:
            index = gl.load(table + n.to(gl.int64) * row)
            if (index >= 0) & (index < slots) & (index != null):
                slot = index.to(gl.int32)
    elif (tokens % interval == 0) & (tokens <= length) & (tokens // interval <= columns):
        index = gl.load(table + n.to(gl.int64) * row + (tokens // interval - 1) * column)
        if (index >= 0) & (index < slots) & (index != null):
            slot = index.to(gl.int32)
    return slot


def checkpoint_arguments(p: Problem, s: Slots) -> tuple[Any, ...]:
    """The arguments of a kernel for POINTERS and NUMBERS."""
    tables = (s.checkpoint_indices, s.checkpoint_offsets)
    interval = min(p.pools.checkpoint_every, p.T + C.value)
    return *tables, len(s.state_pool), p.pools.null_slot, count_checkpoints(s), interval, *checkpoint_table(*tables)
