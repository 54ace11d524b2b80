"""The loop's items of work, each of which is a part of the sequence of one value head. Mostly that is all of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.forward.work_items import bounds

STEP = gl.constexpr(32)  # tokens that the loop does at a time
EARLY = gl.constexpr(128)  # tokens before a part that are walked, too


@gluon.jit
def part_length(size, parts):
    """Tokens of a part, whole steps of the loop."""
    return (size + parts * STEP - 1) // (parts * STEP) * STEP


@gluon.jit
def find_part(item, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """What a program of the loop walks: the sequence, value head, the sequence's first token and length; in it the
    first token to walk, the first one with outputs, and the one after the last; and whether that is a first part.

    work: (cu_seqlens, T, parts, items, pool). ``parts``: of every sequence; None if none is cut. ``pool``: as in
    work_items.py; there none is cut."""
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
