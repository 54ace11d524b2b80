"""The slots of a pool: which one an index names, and which one a row reads."""

import triton
import triton.language as tl


@triton.jit
def load_index(table, row, column, strides, live=True):
    return tl.load(table + row.to(tl.int64) * strides[0] + column * strides[1], mask=live, other=-1)


@triton.jit
def as_slot(index, slots, live):
    """The slot of an index, and whether it is one. ``slots``: their number, and the index that means none."""
    return index.to(tl.int32), live & (index >= 0) & (index < slots[0]) & (index != slots[1])


@triton.jit
def load_slot(table, row, column, strides, slots, live):
    """Loads an index of a slot. Without ``live`` nothing is read."""
    return as_slot(load_index(table, row, column, strides, live), slots, live)


@triton.jit
def find_column(accepted, b, accepted_row, columns):
    """The column of the table of slots that a row reads, and whether that column is in the table."""
    column, live = b * 0, b >= 0
    if accepted is not None:
        count = tl.load(accepted + b.to(tl.int64) * accepted_row)
        column, live = (count - 1).to(tl.int32), (count >= 1) & (count <= columns)
    return column, live


@triton.jit
def find_state(
    read_indices, accepted, has_initial_state, b, read_row, read_column, accepted_row, has_row, columns, slots
):
    """The slot that a row reads, whether it has a state, and whether the row is not padding."""
    column, live = find_column(accepted, b, accepted_row, columns)
    slot = b
    if read_indices is not None:
        slot, live = load_slot(read_indices, b, column, (read_row, read_column), slots, live)
    stored = live
    if has_initial_state is not None:
        has = tl.load(has_initial_state + b.to(tl.int64) * has_row) != 0
        live, stored = live | (has == 0), live & has
    return slot, stored, live


@triton.jit
def load_slots(read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots):
    """Returns, for sequence n, the first state's slot, whether there is one, the last state's slot, and whether n is no
    padding."""
    read, stored, well = find_state(read_indices, None, has_initial_state, n, read_row, 0, 0, has_row, 1, slots)
    write = n
    if write_indices is not None:
        write, well = load_slot(write_indices, n, 0, (write_row, 0), slots, well)
    return read, stored & well, write, well
