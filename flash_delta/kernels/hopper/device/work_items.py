"""The loop's items of work, and the pieces of them that a program scans.

An item is one value head of one sequence. On a pool an earlier kernel has listed the sequences and the slots of their
states (prompt_list.py). A piece is a run of chunks of an item. Without a tape every piece is a whole item, and programs
take items in turns. With a tape (tape.py) a program's first piece may end early, and its last piece may begin late.

The functions take ``work``: (cu_seqlens, T, items, pool, share). pool: the list, the ``least`` and the ``most``
prompts that this launch scans, and the list of parts if prompts are cut; or None. share: the tape's table and the
program's number, or None. If prompts are cut, a part of a prompt counts as a sequence, except that its tokens are
counted from the beginning of the prompt.

Other kernels scan segments (scalar/segments/), one per program, or whole sequences by a tape. A run of chunks is the
one or the other. With SEGMENTS their ``work`` is (cu_seqlens, T, length, N)."""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.layouts import C
from flash_delta.kernels.hopper.device.segment_bounds import extent, find_chunks, first_slot, load_bound, place


class Listed(NamedTuple):
    """The prompts on a pool that a launch scans: those of a list, if there are ``least`` to ``most`` of them."""

    prompts: Tensor | None
    least: int
    most: int


NO_LIST = Listed(None, 0, 0)  # without a pool


@gluon.jit
def count_items(items, pool, HV):
    """The number of items of work. On a pool an earlier kernel has counted the sequences (prompt_list.py). There is no
    work if their number is outside of this launch's range."""
    if pool is None:
        return items
    else:
        prompts, least, most = pool[0], pool[1], pool[2]
        gdc_wait()  # the kernel that makes the list has ended
        count = gl.load(prompts)
        return gl.where((count >= least) & (count <= most), count * HV, 0)


@gluon.jit
def bounds(item, cu_seqlens, pool, T, HV, PACKED: gl.constexpr):
    """An item's sequence and value head, the sequence's first token in its batch row, and its length."""
    n, hv = item // HV, item % HV
    if pool is not None:
        n = gl.load(pool[0] + 3 * n + 1)
    start, stop = extent(n, cu_seqlens, T, PACKED)
    return n, hv, start, stop - start


@gluon.jit
def enter(tape):
    """A program's number on the tape, and which block of value columns it has. Programs get numbers in the order in
    which they start."""
    gdc_wait()  # the tape is there
    number = gl.atomic_add(tape, 1).to(gl.int32)
    return number % gl.num_programs(0), number // gl.num_programs(0)


@gluon.jit
def find_pieces(work, HV):
    """Returns a program's pieces. The first three results say how to go through them: from, to, step. With a tape three
    more follow: the first piece's item, the chunk with which the last piece begins, and the chunk before which the
    first piece ends (0: the first piece ends with its item)."""
    _, _, items, pool, share = work
    items = count_items(items, pool, HV)
    if share is None:
        return gl.program_id(0), items, gl.num_programs(0)
    else:
        border = share[0] + 3 + 2 * share[1]
        low, entry = gl.load(border).to(gl.int32), gl.load(border + 1).to(gl.int32)
        high, leave = gl.load(border + 2).to(gl.int32), gl.load(border + 3).to(gl.int32)
        first = gl.where(leave > 0, high, high - 1)
        return 0, gl.where(items > 0, first - low + 1, 0), 1, first, entry, leave


@gluon.jit
def find_piece(i, pieces, work, HV, PACKED: gl.constexpr):
    """Piece i of a program: its item, sequence and value head; the sequence's first token in its batch row, and its
    length; the piece's first token in the sequence, and the token after its last."""
    cu_seqlens, T, _, pool, share = work
    if share is None:
        n, hv, start, length = bounds(i, cu_seqlens, pool, T, HV, PACKED)
        if pool is not None and len(pool) > 3:
            begin, end, _ = find_part(i, pool, length, HV)
            return i, n, hv, start, length, begin, end
        else:
            return i, n, hv, start, length, length * 0, length
    else:
        _, count, _, first, entry, leave = pieces
        item = first - i
        n, hv, start, length = bounds(item, cu_seqlens, pool, T, HV, PACKED)
        own, stop = 0, length
        if pool is not None and len(pool) > 3:
            own, stop, _ = find_part(item, pool, length, HV)
        begin = gl.where(i == count - 1, own + entry * C, own)
        end = gl.where((i == 0) & (leave > 0), gl.minimum(own + leave * C, stop), stop)
        return item, n, hv, start, length, begin, end


@gluon.jit
def find_runs(work, HV, SEGMENTS: gl.constexpr):
    """A program's runs of chunks, as `find_pieces` finds pieces."""
    if SEGMENTS:
        return 0, 1, 1
    else:
        return find_pieces(work, HV)


@gluon.jit
def find_run(i, runs, work, HV, PACKED: gl.constexpr, SEGMENTS: gl.constexpr, BACK: gl.constexpr = False):
    """Run i of a program: its value head and batch row; the sequence's first token and length; the run's first token in
    the sequence, the number of its chunks, and the first chunk's slot; then its sequence, its segment's slot (or its
    sequence), its number (0: it begins the sequence), and whether it ends the sequence. BACK: chains are scanned from
    their last chunk, with which they begin on the tape."""
    if SEGMENTS:
        cu_seqlens, T, length, N = work
        slot, hv = place(HV)
        n, row, start, size, token, chunks, chunk, number, last = find_chunks(HV, length, cu_seqlens, N, T, PACKED)
        return hv, row, start, size, token, chunks, chunk, n, slot, number, last
    else:
        _, n, hv, start, size, begin, end = find_piece(i, runs, work, HV, PACKED)
        first, chunks, all_chunks = begin // C, (end - begin + C - 1) // C, (size + C - 1) // C
        if BACK:
            first = all_chunks - (end + C - 1) // C
        row = n
        if PACKED:
            row = n * 0
        chunk = first_slot(n, start, work[1], PACKED) + first
        return hv, row, start, size, first * C, chunks, chunk, n, n, first, first + chunks == all_chunks


@gluon.jit
def find_part(item, pool, length, HV):
    """An item's part of its prompt: its first token, the one after its last, and the number of the state that it starts
    from, or -1 for a prompt's first part (prompt_list.py)."""
    at = pool[3] + 5 * (item // HV) + 2
    start = gl.load(at + 2)
    return gl.load(at) * C, gl.minimum(gl.load(at + 1) * C, length), gl.where(start < 0, start, start + item % HV)


@gluon.jit
def ends(item, pool, HV):
    """The slots, on a pool, from which an item's state is read and to which it is written. -1: there is none."""
    at = pool[0] + 3 * (item // HV) + 2
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def clear_padding(o, cu_seqlens, N, T, i, program, programs, COLUMNS: gl.constexpr):
    """Writes zeros to o after the last sequence of a packed row. Programs take the tokens in turns."""
    end = load_bound(cu_seqlens, N, T)
    none = (i * 0).to(gl.float32)
    for token in range(end + program, T, programs):
        row = (i * 0 + token).to(gl.int64) * COLUMNS
        for column in range(0, COLUMNS, C):
            gl.store(o + (row + column + i), none)
