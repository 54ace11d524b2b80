"""The loop's items of work. An item is one value head of a part of a sequence, usually of the whole sequence."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.work_items import bounds, find_piece, find_pieces

STEP = gl.constexpr(32)  # tokens that the loop scans at a time
EARLY = gl.constexpr(128)  # tokens before a part that are scanned, too


class Work(NamedTuple):
    """What a program finds its items by: as in work_items.py, and how many parts each sequence has, or None if no
    sequence has parts. On a pool and with a tape there are no parts."""

    cu_seqlens: Any
    T: Any
    parts: Any
    items: Any
    pool: Any
    share: Any


class Part(NamedTuple):
    """What a program scans as one of its pieces."""

    item: Any  # the state's number
    n: Any  # the sequence
    hv: Any  # the value head
    start: Any  # the sequence's first token in its batch row
    size: Any  # the tokens of the sequence
    first: Any  # the first token to scan, in the sequence
    begin: Any  # the first token with outputs
    end: Any  # the token after the last


@gluon.jit
def part_length(size, parts):
    """The number of tokens of a part, in whole steps of the loop."""
    return (size + parts * STEP - 1) // (parts * STEP) * STEP


@gluon.jit
def find_work(work, HV: gl.constexpr):
    """A program's pieces, as in work_items.py."""
    return find_pieces((work.cu_seqlens, work.T, work.items, work.pool, work.share), HV)


@gluon.jit
def find_part(i, pieces, work, HV: gl.constexpr, PACKED: gl.constexpr):
    """The `Part` that is piece i of a program."""
    if work.parts is None:
        own = (work.cu_seqlens, work.T, work.items, work.pool, work.share)
        item, n, hv, start, size, begin, end = find_piece(i, pieces, own, HV, PACKED)
        return Part(item, n, hv, start, size, begin, begin, end)
    else:
        parts = work.parts
        n, hv, start, size = bounds(i // parts, work.cu_seqlens, None, work.T, HV, PACKED)
        part, length = i % parts, part_length(size, parts)
        begin = part * length
        end = gl.minimum(begin + length, size)
        first = gl.where(part > 0, begin - EARLY, 0)
        return Part(i // parts, n, hv, start, size, gl.where(begin < end, first, end), begin, end)
