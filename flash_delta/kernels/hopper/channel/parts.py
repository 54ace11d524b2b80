"""The loop's items of work. An item is one value head of a part of a sequence, usually of the whole sequence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.work_items import Piece, bounds, find_piece

STEP = gl.constexpr(32)  # tokens that the loop scans at a time
EARLY = gl.constexpr(128)  # tokens before a part that are scanned, too


@gluon.jit
def part_length(size, parts):
    """The number of tokens of a part, in whole steps of the loop."""
    return (size + parts * STEP - 1) // (parts * STEP) * STEP


@gluon.jit
def find_part(i, pieces, work, HV):
    """The `Piece` that a program scans as its piece i. On a pool and with a tape sequences have no parts."""
    if work.parts is None:
        return find_piece(i, pieces, work, HV)
    else:
        parts = work.parts
        own = bounds(i // parts, work, HV)
        part, length = i % parts, part_length(own.size, parts)
        begin = part * length
        end = gl.minimum(begin + length, own.size)
        first = gl.where(part > 0, begin - EARLY, 0)
        first = gl.where(begin < end, first, end)
        return Piece(i // parts, own.n, own.hv, own.start, own.size, first, begin, end)
