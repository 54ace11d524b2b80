"""The loop's items of work, and the pieces of them that a program scans.

An item is one value head of one sequence. On a pool an earlier kernel has listed the sequences and the slots of their
states (prompt_list.py). A piece is a run of chunks of an item. Without a tape every piece is a whole item, and programs
take items in turns. With a tape (tape.py) a program's first piece may end early, and its last piece may begin late.

Other kernels scan segments (scalar/segments/), one per program, or whole sequences by a tape. A run of chunks is the
one or the other."""

from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.layouts import C
from flash_delta.kernels.hopper.device.segment_bounds import Run, extent, find_chunks, first_slot, load_bound, place


class Listed(NamedTuple):
    """The prompts on a pool that a launch scans: those of a list, if there are ``least`` to ``most`` of them."""

    prompts: Any  # a layout, or None
    least: int
    most: int


NO_LIST = Listed(None, 0, 0)  # without a pool


class Work(NamedTuple):
    """What a program finds its work by."""

    cu_seqlens: Any  # None if every sequence has a batch row
    T: Any  # the tokens of a batch row
    items: Any  # how many there are; with ``length`` the number of sequences
    prompts: Any = None  # the list of prompts on a pool, or None without a pool
    least: Any = None  # as in `Listed`
    most: Any = None
    cuts: Any = None  # the list of prompts' parts, or None. A part counts as a sequence, with the tokens of the prompt
    tape: Any = None  # its table (tape.py), or None
    program: Any = None  # the program's number on it
    parts: Any = None  # how many parts each sequence has (channel/parts.py), or None
    length: Any = None  # the tokens of a segment; None if programs scan items


# How a program goes through its pieces: from ``begin`` to ``end``. With a tape also the ``first`` piece's item, the
# chunk with which the last piece begins, and the one before which the first piece ends (0: it ends with its item).
Pieces = namedtuple("Pieces", "begin end step first entry leave")


class Piece(NamedTuple):
    """What a program scans at a time."""

    item: Any  # the state's number
    n: Any  # the sequence
    hv: Any  # the value head
    start: Any  # the sequence's first token in its batch row
    size: Any  # the tokens of the sequence
    first: Any  # the first token to scan, in the sequence
    begin: Any  # the first token with outputs
    end: Any  # the token after the last


@gluon.jit
def count_items(work, HV):
    """The number of items of work. On a pool an earlier kernel has counted the sequences (prompt_list.py). There is no
    work if their number is outside of this launch's range."""
    if work.prompts is None:
        return work.items
    else:
        gdc_wait()  # the kernel that makes the list has ended
        count = gl.load(work.prompts)
        return gl.where((count >= work.least) & (count <= work.most), count * HV, 0)


@gluon.jit
def bounds(item, work, HV):
    """Finds an item, as one `Piece`."""
    n, hv = item // HV, item % HV
    if work.prompts is not None:
        n = gl.load(work.prompts + 3 * n + 1)
    start, stop = extent(n, work.cu_seqlens, work.T)
    return Piece(item, n, hv, start, stop - start, 0, 0, stop - start)


@gluon.jit
def enter(tape):
    """A program's number on the tape, and which block of value columns it has. Programs get numbers in the order in
    which they start."""
    gdc_wait()  # the tape is there
    number = gl.atomic_add(tape, 1).to(gl.int32)
    return number % gl.num_programs(0), number // gl.num_programs(0)


@gluon.jit
def find_pieces(work, HV):
    """Finds a program's `Pieces`."""
    if work.length is not None:
        return Pieces(0, 1, 1, 0, 0, 0)
    else:
        items = count_items(work, HV)
        if work.tape is None:
            return Pieces(gl.program_id(0), items, gl.num_programs(0), 0, 0, 0)
        else:
            border = work.tape + 3 + 2 * work.program
            low, entry = gl.load(border).to(gl.int32), gl.load(border + 1).to(gl.int32)
            high, leave = gl.load(border + 2).to(gl.int32), gl.load(border + 3).to(gl.int32)
            first = gl.where(leave > 0, high, high - 1)
            return Pieces(0, gl.where(items > 0, first - low + 1, 0), 1, first, entry, leave)


@gluon.jit
def find_piece(i, pieces, work, HV):
    """Finds `Piece` i of a program."""
    if work.tape is None:
        own = bounds(i, work, HV)
        begin, end, _ = find_part(i, work, HV, own.size)
        return Piece(i, own.n, own.hv, own.start, own.size, begin, begin, end)
    else:
        item, leave = pieces.first - i, pieces.leave
        own = bounds(item, work, HV)
        start, stop, _ = find_part(item, work, HV, own.size)
        begin = gl.where(i == pieces.end - 1, start + pieces.entry * C, start)
        end = gl.where((i == 0) & (leave > 0), gl.minimum(start + leave * C, stop), stop)
        return Piece(item, own.n, own.hv, own.start, own.size, begin, begin, end)


@gluon.jit
def find_run(i, pieces, work, HV, BACK: gl.constexpr = False):
    """Finds run i of a program: its value head, its segment's slot (or its sequence), and the `Run`. BACK: chains are
    scanned from their last chunk, with which they begin on the tape."""
    if work.length is not None:
        slot, hv = place(HV)
        return hv, slot, find_chunks(work, HV)
    else:
        piece = find_piece(i, pieces, work, HV)
        n, size, end = piece.n, piece.size, piece.end
        first, chunks, all_chunks = piece.begin // C, (end - piece.begin + C - 1) // C, (size + C - 1) // C
        if BACK:
            first = all_chunks - (end + C - 1) // C
        PACKED: gl.constexpr = work.cu_seqlens is not None
        row = n
        if PACKED:
            row = n * 0
        chunk, token = first_slot(n, piece.start, work.T, PACKED) + first, first * C
        last = first + chunks == all_chunks
        return piece.hv, n, Run(n, row, piece.start, size, token, chunks, chunk, first, last)


@gluon.jit
def find_part(item, work, HV, size):
    """An item's part of its prompt: its first token, the one after its last, and the number of the state that it starts
    from, or -1 for a prompt's first part (prompt_list.py)."""
    if work.cuts is not None:
        at = work.cuts + 5 * (item // HV) + 2
        start = gl.load(at + 2)
        start = gl.where(start < 0, start, start + item % HV)
        return gl.load(at) * C, gl.minimum(gl.load(at + 1) * C, size), start
    else:
        return 0, size, -1


@gluon.jit
def ends(item, work, HV):
    """The slots, on a pool, from which an item's state is read and to which it is written. -1: there is none."""
    at = work.prompts + 3 * (item // HV) + 2
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def clear_padding(o, cu_seqlens, N, T, i, program, programs, COLUMNS, STEPS: gl.constexpr = 1):
    """Writes zeros to o after the last sequence of a packed row. Programs take the tokens in turns."""
    end = load_bound(cu_seqlens, N, T)
    none = (i * 0).to(gl.float32)
    if STEPS > 1:
        end, T = end // STEPS, T // STEPS
    for token in range(end + program, T, programs):
        row = (i * 0 + token).to(gl.int64) * COLUMNS
        for column in range(0, COLUMNS, C):
            gl.store(o + (row + column + i), none)
