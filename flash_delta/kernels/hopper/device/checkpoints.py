"""Finds which states of a sequence are stored in slots of a pool, for the loops."""

from collections import namedtuple
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.layouts import C
from flash_delta.kernels.runtime.arguments import checkpoint_table, count_checkpoints
from flash_delta.problem import Problem, Slots

NUMBERS = ["slots", "null_slot", "columns", "interval", "table_row", "table_column"]
POINTERS = ["checkpoints", "offsets"]
NONE = (None, None, *(0 for _ in NUMBERS))  # the arguments of a kernel without checkpoints

# Where states are stored. ``row``, ``column``: the strides of the ``table`` of slots, which is None if nothing is. If
# there are ``offsets``, ``column`` is their stride. Otherwise every ``interval`` tokens have a column.
FIELDS = "table slots null_slot columns interval row column offsets"
Checkpoints = namedtuple("Checkpoints", FIELDS, defaults=[None] * 8)


@gluon.jit
def find_offset(checkpoints, n, length, STEP: gl.constexpr = C):
    """The number of tokens, in whole chunks, after which a scan leaves the checkpoint of sequence n at an offset. 0 if
    it leaves none (triton/serving/offsets.py), or if there are no offsets. STEP: tokens that the scan takes at a
    time."""
    tokens = n * 0
    if checkpoints.table is not None and checkpoints.offsets is not None:
        offset = gl.load(checkpoints.offsets + n.to(gl.int64) * checkpoints.column)
        if (offset >= 0) & (offset <= length):
            tokens = offset.to(gl.int32) // C * C
            if offset == length:
                tokens = (length + STEP - 1) // STEP * STEP
    return tokens


@gluon.jit
def known_slot(index, slot, checkpoints):
    """The slot at ``index``. If it is none of the pool's, ``slot``."""
    if (index >= 0) & (index < checkpoints.slots) & (index != checkpoints.null_slot):
        slot = index.to(gl.int32)
    return slot


@gluon.jit
def find_checkpoint(checkpoints, n, tokens, length, offset):
    """The slot for the state of sequence n after so many ``tokens``, or -1 if it is not wanted. ``offset``: the result
    of `find_offset`."""
    table, interval, slot = checkpoints.table, checkpoints.interval, n * 0 - 1
    if checkpoints.offsets is not None:
        if tokens == offset:
            slot = known_slot(gl.load(table + n.to(gl.int64) * checkpoints.row), slot, checkpoints)
    elif (tokens % interval == 0) & (tokens <= length) & (tokens // interval <= checkpoints.columns):
        at = table + n.to(gl.int64) * checkpoints.row + (tokens // interval - 1) * checkpoints.column
        slot = known_slot(gl.load(at), slot, checkpoints)
    return slot


def checkpoint_values(p: Problem, s: Slots) -> tuple[Any, ...]:
    """The arguments of a kernel for POINTERS and NUMBERS."""
    tables = (s.checkpoint_indices, s.checkpoint_offsets)
    interval = min(p.pools.checkpoint_every, p.T + C.value)
    return *tables, s.state_pool.shape[0], p.pools.null_slot, count_checkpoints(s), interval, *checkpoint_table(*tables)
