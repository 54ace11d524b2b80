"""Finds the segments of sequences. Every program finds its own segment, as it finds chunks (device/chunk.py).

device/chunk.py has functions of the same names in Triton. There are separate ones here for two reasons. They search one
number after the other, which needs no layout. And the tests run Gluon kernels in plain Python (gluon_emulator.py).
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.layouts import BY_WARP, C

FADED = gl.constexpr(-184.0)  # as a power of two
SMALLEST_NORMAL = gl.constexpr(2.0**-126)


# A segment: its sequence, or its number in a list; the batch row; in the row the segment's first token, the sequence's
# first token, and the one after its last; the segment's number in the sequence, and whether it is the last one.
Segment = namedtuple("Segment", "n row token start stop number last")


# Chunks of a sequence that a program scans: a segment, or a piece (work_items.py). Its sequence (in `find_listed` the
# part's number) and batch row; the sequence's first token in its batch row, and its tokens; the run's first token in
# the sequence, how many chunks it has, and the slot of the first one; its number (0: it begins the sequence), and
# whether it ends the sequence.
Run = namedtuple("Run", "n row start size token chunks chunk number last")
# A chunk that a program computes: the number of its slot and head, its batch row, the sequence's first token and
# length, and the chunk's first token in the sequence.
Chunk = namedtuple("Chunk", "item row start size first")


@gluon.jit
def load_bound(cu_seqlens, n, T):
    """The token at which sequence n begins, and the one before it ends. Wrong bounds are moved into the row."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + n), 0), T).to(gl.int32)


@gluon.jit
def extent(n, cu_seqlens, T):
    """The first token of sequence n and the token after its last, in its batch row."""
    start, stop = n * 0, n * 0 + T
    if cu_seqlens is not None:
        start = load_bound(cu_seqlens, n, T)
        stop = gl.maximum(load_bound(cu_seqlens, n + 1, T), start)
    return start, stop


@gluon.jit
def first_slot(n, start, T, PACKED: gl.constexpr):
    """The slot of a sequence's first chunk, as in device/chunk.py."""
    slot = n * ((T + C - 1) // C)
    if PACKED:
        slot = start // C + n
    return slot


@gluon.jit
def nth(m, N, prompts):
    """Sequence m of N, or of those that ``prompts`` lists (plans/prompt_list.py). If it lists none, any sequence."""
    n = m
    if prompts is not None:
        n = gl.where(N > 0, gl.load(prompts + 3 * gl.maximum(m, 0) + 1), 0)
    return n


@gluon.jit
def find_segment(slot, length, cu_seqlens, N, T, prompts=None):
    """The `Segment` in a slot of ``length`` tokens. A sequence without tokens has one segment. A slot without a segment
    has no tokens, and is not the last. ``prompts``: only the N sequences of this list have slots."""
    n = slot // ((T + length - 1) // length)
    first, row = n * ((T + length - 1) // length), n
    if cu_seqlens is not None:
        low, high = slot * 0, slot * 0 + N - 1
        while low < high:  # finds the last sequence whose slots begin here or before
            middle = (low + high + 1) // 2
            if load_bound(cu_seqlens, nth(middle, N, prompts), T) // length + middle <= slot:
                low = middle
            else:
                high = middle - 1
        n, row = low, slot * 0
        first = load_bound(cu_seqlens, nth(n, N, prompts), T) // length + n
    start, stop = extent(nth(n, N, prompts), cu_seqlens, T)
    number = gl.maximum(slot - first, 0)  # below 0 if bounds decrease, or begin above 0
    token = start + number * length
    last = (token + length >= stop) & ((token < stop) | (number == 0))
    return Segment(n, row, token, start, stop, number, last)


@gluon.jit
def part_length(tokens, cut):
    """The chunks of a prompt's parts, as in cut.py, and how many chunks are before the last part."""
    shortest, fewest, most = cut
    whole, chunks = tokens // C, (tokens + C - 1) // C
    number = gl.where(whole >= shortest, gl.minimum(whole // fewest, most), 1)
    length = gl.maximum((chunks + number - 1) // number, 1)
    return length, gl.maximum((chunks - 1) // length, 0) * length


@gluon.jit
def place(HV):
    """The slot of this program's segment, and its value head. The heads of a slot are launched one after the other, so
    that the long segments of all heads start together, before the short sequences of any head."""
    return gl.program_id(0) // HV, gl.program_id(0) % HV


@gluon.jit
def find_chunks(work, HV):
    """The `Run` that is this program's segment. ``work``: `Work` (work_items.py)."""
    slot, _ = place(HV)
    own = find_segment(slot, work.length, work.cu_seqlens, work.items, work.T)
    chunks = (gl.maximum(gl.minimum(work.length, own.stop - own.token), 0) + C - 1) // C
    chunk = first_slot(own.n, own.start, work.T, work.cu_seqlens is not None)
    size, token = own.stop - own.start, own.token - own.start
    chunk += own.number * (work.length // C)
    return Run(own.n, own.row, own.start, size, token, chunks, chunk, own.number, own.last)


@gluon.jit
def is_Phi():
    """Whether this program's map is Phi (1) or B (0)."""
    return 1 - gl.program_id(1)


@gluon.jit
def find_map(work, HV):
    """The `Run` of this program's map, without chunks if the map is not needed."""
    keys = is_Phi()
    if work.cuts is not None:
        return find_listed(work, keys, HV)
    else:
        run = find_chunks(work, HV)
        chunks = run.chunks
        if run.last | ((run.number == 0) & (keys > 0)):
            chunks = chunks * 0
        return rest_of(run, 0, chunks)


@gluon.jit
def find_listed(work, keys, HV):
    """The `Run` of `find_map` for a part of the prompts that are cut. Its number is the part's first chunk. Nobody
    needs to know whether it is the last one."""
    prompts, parts = work.prompts, work.cuts
    gdc_wait()  # the kernel that makes the lists has ended
    s, _ = place(HV)
    known = s < gl.load(parts)
    m = gl.where(known, gl.load(parts + 5 * gl.where(known, s, 0) + 5), 0)
    begin, end = gl.load(parts + 5 * m + 2), gl.load(parts + 5 * m + 3)
    n = gl.where(known, gl.load(prompts + 3 * m + 1), 0)
    start, stop = extent(n, work.cu_seqlens, work.T)
    needed = known & (end * C < stop - start) & ((begin > 0) | (keys == 0))
    chunk, token = first_slot(n, start, work.T, True) + begin, begin * C
    return Run(m, m * 0, start, stop - start, token, gl.where(needed, end - begin, 0), chunk, begin, needed)


@gluon.jit
def rest_of(run, skipped, chunks):
    """A run without the chunks that are ``skipped``, of which so many ``chunks`` are left."""
    token, chunk = run.token + skipped * C, run.chunk + skipped
    return Run(run.n, run.row, run.start, run.size, token, chunks, chunk, run.number, run.last)


@gluon.jit
def without_faded(run, left):
    """Leaves out the chunks of a map that have decayed. ``left``: how many have not, at the segment's end. If some have
    decayed, Phi is zero."""
    skipped = gl.maximum(run.chunks - left, 0)
    return rest_of(run, skipped, gl.where((is_Phi() > 0) & (skipped > 0), 0, run.chunks - skipped))


@gluon.jit
def count_left(rates, run, hv, HV, FROM_END: gl.constexpr):
    """How many chunks of a segment, counted from its end or from its start, still have an effect there: they have not
    decayed by 2^-184. After such a decay, numbers below 2^35 are zero in float32."""
    chunks = run.chunks
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, BY_WARP))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, BY_WARP))
    count, decayed, going = chunks * 0, 0.0, chunks > 0
    while going:
        c = count + j
        if FROM_END:
            c = chunks - 1 - c
        at = ((run.chunk + c) * HV + hv).to(gl.int64) * (8 * C) + 7 * C
        gamma = gl.load(rates + at, mask=count + j < chunks, other=1.0)
        bits = gl.log2(gl.maximum(gamma, SMALLEST_NORMAL))
        square = bits[None, :] + gl.zeros([64, 64], gl.float32, BY_WARP)
        before = decayed + gl.sum(gl.where(j[None, :] < i[:, None], square, 0.0), 1)
        left = gl.sum(gl.where((before > FADED) & (count + i < chunks), 1, 0), 0)
        decayed += gl.sum(bits, 0)
        count += left
        going = (left == 64) & (count < chunks)
    return count
