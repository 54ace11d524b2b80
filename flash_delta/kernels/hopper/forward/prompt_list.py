"""Which sequences of a prefill the loop walks. One program of `rates` finds them on the device: those that are not
padding and have more than SHORT tokens. `decode` runs the shorter ones; with SHORT 0 it runs none."""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import bounds
from flash_delta.kernels.triton.forward.scan import load_slots


@triton.jit
def find_slots(tables, n, slots):
    """The slots that sequences n read and write (-1: none), and whether they are no padding, as in `scan`.

    tables: indices of slots to read and to write, flags of initial states, and the strides of these three.
    slots: as `as_slot` takes it."""
    read_indices, write_indices, has_initial_state, read_row, write_row, has_row = tables
    read, stored, write, well = load_slots(
        read_indices, write_indices, has_initial_state, n, read_row, write_row, has_row, slots
    )
    if write_indices is None:
        write = n * 0 - 1
    return tl.where(stored, read, -1), write, well


@triton.jit
def list_walks(walks, tables, cu_seqlens, N, T, slots, SHORT: tl.constexpr):
    """Writes how many sequences the loop walks, and for each its number, the slot that its state is read from and the
    slot that it is written to; -1 where there is none."""
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
    """Whether `decode` runs sequence n. What lies after the last sequence does not count as one."""
    start, stop, _ = bounds(n, cu_seqlens, N, T, 1, True)
    return (n < N) & (stop - start <= SHORT)
