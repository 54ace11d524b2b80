"""Where segments of sequences lie: found by every program, as slots of chunks are (device/chunk.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.layouts import C


@gluon.jit
def load_bound(cu_seqlens, n, T):
    """Where sequence n begins, and the one before it ends; wrong bounds are moved into the row (device/chunk.py)."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + n), 0), T).to(gl.int32)


@gluon.jit
def extent(n, cu_seqlens, T, PACKED: gl.constexpr):
    """Of sequence n its first token and the one behind its last, in its batch row."""
    start, stop = n * 0, n * 0 + T
    if PACKED:
        start = load_bound(cu_seqlens, n, T)
        stop = gl.maximum(load_bound(cu_seqlens, n + 1, T), start)
    return start, stop


@gluon.jit
def find_segment(slot, length, cu_seqlens, N, T, PACKED: gl.constexpr):
    """Of a slot of ``length`` tokens: its sequence, batch row, first token, the sequence's bounds, number in the
    sequence, and whether it is the last. A sequence without tokens has one; no segment: no tokens, not the last."""
    n = slot // ((T + length - 1) // length)
    first, row = n * ((T + length - 1) // length), n
    if PACKED:
        low, high = slot * 0, slot * 0 + N - 1
        while low < high:  # the last sequence whose slots begin here or before
            middle = (low + high + 1) // 2
            if load_bound(cu_seqlens, middle, T) // length + middle <= slot:
                low = middle
            else:
                high = middle - 1
        n, row = low, slot * 0
        first = load_bound(cu_seqlens, n, T) // length + n
    start, stop = extent(n, cu_seqlens, T, PACKED)
    number = gl.maximum(slot - first, 0)  # below 0 if bounds go down, or begin above 0
    token = start + number * length
    last = (token + length >= stop) & ((token < stop) | (number == 0))
    return n, row, token, start, stop, number, last


@gluon.jit
def find_chunks(length, cu_seqlens, N, T, PACKED: gl.constexpr):
    """Of a program's segment: its sequence, batch row, the sequence's first token and length, the segment's first token
    in it, its chunks and the slot of the first one, its number, and whether it ends the sequence."""
    n, row, token, start, stop, number, last = find_segment(gl.program_id(0), length, cu_seqlens, N, T, PACKED)
    chunks = (gl.maximum(gl.minimum(length, stop - token), 0) + C - 1) // C
    slot = n * ((T + C - 1) // C)
    if PACKED:
        slot = start // C + n
    return n, row, start, stop - start, token - start, chunks, slot + number * (length // C), number, last
