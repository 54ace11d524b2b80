"""The loop's items of work. An item is one value head of a part of a sequence, usually of the whole sequence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.work_items import bounds, find_piece, find_pieces

STEP = gl.constexpr(32)  # tokens that the loop scans at a time
EARLY = gl.constexpr(128)  # tokens before a part that are scanned, too


@gluon.jit
def part_length(size, parts):
    """The number of tokens of a part, in whole steps of the loop."""
    return (size + parts * STEP - 1) // (parts * STEP) * STEP


@gluon.jit
def find_work(work, HV: gl.constexpr):
    """A program's pieces, as in work_items.py.

    work: (cu_seqlens, T, parts, items, pool, share), as there. ``parts``: how many each sequence has, or None if no
    sequence has parts. On a pool and with a tape there are none."""
    return find_pieces((work[0], work[1], work[3], work[4], work[5]), HV)


@gluon.jit
def find_part(i, pieces, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """What a program of the loop scans as its piece i: the state's number; the sequence, value head, the sequence's
    first token and length; in the sequence the first token to scan, the first one with outputs, and the one after the
    last."""
    cu_seqlens, T, parts, items, pool, share = work
    if parts is None:
        own = (cu_seqlens, T, items, pool, share)
        item, n, hv, start, size, begin, end = find_piece(i, pieces, own, HV, PACKED)
        return item, n, hv, start, size, begin, begin, end
    else:
        n, hv, start, size = bounds(i // parts, cu_seqlens, None, T, HV, PACKED)
        part, length = i % parts, part_length(size, parts)
        begin = part * length
        end = gl.minimum(begin + length, size)
        first = gl.where(part > 0, begin - EARLY, 0)
        return i // parts, n, hv, start, size, gl.where(begin < end, first, end), begin, end
