"""Which sequences of a prefill the loop walks, found on the device by a program of `rates`: those of more than SHORT
tokens (`decode` runs the others; with SHORT 0 it runs none) that are no padding."""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds
from flash_delta.kernels.triton.forward.scan import load_slots


@triton.jit
def find_slots(tables, n, slots):
    """Of sequences, as `scan` has it; ``tables``: of indices to read, to write, of flags, and their strides."""
    read_indices, write_indices, has_initial_state, read_row, write_row, has_row = tables
    read, stored, write, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
    )
    if write_indices is None:
        write = n * 0 - 1
    return tl.where(stored, read, -1), write, well


@triton.jit
def list_walks(walks, tables, cu_seqlens, N, T, slots, SHORT: tl.constexpr):
    """How many there are, and of each its number, the slot of its first state and that of its last one; -1: none."""
    count = N * 0
    for i in range(0, N, 128):
        at = i + tl.arange(0, 128)
        n = tl.minimum(at, N - 1)
        start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
        first, last, well = find_slots(tables, n, slots)
        if SHORT > 0:
            well = well & (stop - start > SHORT)
        walked = (well & (at < N)).to(tl.int32)
        to = walks + 3 * (count + tl.cumsum(walked, 0) - walked) + 1
        tl.store(to, n, mask=walked != 0)
        tl.store(to + 1, first, mask=walked != 0)
        tl.store(to + 2, last, mask=walked != 0)
        count += tl.sum(walked, 0)
    tl.store(walks, count)


@triton.jit
def is_short(n, cu_seqlens, N, T, SHORT: tl.constexpr):
    """Whether `decode` runs sequence n. What lies behind the last one is none."""
    start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
    return (n < N) & (stop - start <= SHORT)
