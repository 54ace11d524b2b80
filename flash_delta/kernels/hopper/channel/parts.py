"""The loop's items of work. An item is one value head of a part of a sequence, usually of the whole sequence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.forward.work_items import bounds

STEP = gl.constexpr(32)  # tokens that the loop walks at a time
EARLY = gl.constexpr(128)  # tokens before a part that are walked, too


@gluon.jit
def part_length(size, parts):
    """The number of tokens of a part, in whole steps of the loop."""
    return (size + parts * STEP - 1) // (parts * STEP) * STEP


@gluon.jit
def find_part(item, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """What a program of the loop walks: the sequence, value head, the sequence's first token and length; in the
    sequence the first token to walk, the first one with outputs, and the one after the last; and whether this is the
    first part.

    work: (cu_seqlens, T, parts, items, pool). ``parts``: how many each sequence has, or None if no sequence is cut.
    ``pool``: as in work_items.py. On a pool no sequence is cut."""
    cu_seqlens, T, parts, _, pool = work
    if parts is None:
        n, hv, start, size = bounds(item, cu_seqlens, pool, T, HV, PACKED)
        return n, hv, start, size, size * 0, size * 0, size, True
    else:
        n, hv, start, size = bounds(item // parts, cu_seqlens, None, T, HV, PACKED)
        part, length = item % parts, part_length(size, parts)
        begin = part * length
        end = gl.minimum(begin + length, size)
        first = gl.where(part > 0, begin - EARLY, 0)
        return n, hv, start, size, gl.where(begin < end, first, end), begin, end, part == 0
