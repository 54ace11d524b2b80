"""Of a prompt alone that is walked in segments, the way of its states between the pool and tensors of their own: what
stands around it walks any sequence, and knows of no slot."""

import triton
import triton.language as tl

from flash_delta.kernels.hopper.walks import find_slots
from flash_delta.kernels.triton.chunk import bounds, follow

NUMBERS = ["T", "slots", "slot_stride", "read_row", "write_row", "has_row"]
INDICES = ["read_indices", "write_indices", "has_initial_state"]  # as `decode` has them


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def hand_over(
    pool, states, span, cu_seqlens, read_indices, write_indices, has_initial_state, T, slots, slot_stride, read_row,
    write_row, has_row, SHORT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first state as float32, and in ``span`` the bounds of what is to be walked: nothing, if `decode` runs it or
    it is padding. BACK: the last state. Grid (numbers of a slot / BLOCK)."""
    tables = (read_indices, write_indices, has_initial_state, read_row, write_row, has_row)
    first, last, well = find_slots(tables, tl.program_id(0) * 0, slots)
    start, stop, _ = bounds(tl.program_id(0) * 0, cu_seqlens, 1, T, 1, True)
    well = well & (stop - start > SHORT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BACK:
        follow(OVERLAP)
        S = tl.load(states + i)
        tl.store(pool + last.to(tl.int64) * slot_stride + i, S.to(pool.dtype.element_ty), mask=well & (last >= 0))
    else:
        S = tl.load(pool + first.to(tl.int64) * slot_stride + i, mask=well & (first >= 0), other=0.0)
        tl.store(states + i, S.to(tl.float32))
        if tl.program_id(0) == 0:
            tl.store(span, start)
            tl.store(span + 1, tl.where(well, stop, start))
