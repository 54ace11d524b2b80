"""Finds the segments of sequences. Every program finds its own segment, as it finds chunks (device/chunk.py).

device/chunk.py has functions of the same names in Triton. There are separate ones here for two reasons. They search one
number after the other, which needs no layout. And the tests run Gluon kernels in plain Python (gluon_emulator.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flash_delta.kernels.hopper.device.layouts import BY_WARP, C

FADED = gl.constexpr(-184.0)  # as a power of two
SMALLEST_NORMAL = gl.constexpr(2.0**-126)


@gluon.jit
def load_bound(cu_seqlens, n, T):
    """The token at which sequence n begins, and the one before it ends. Wrong bounds are moved into the row."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + n), 0), T).to(gl.int32)


@gluon.jit
def extent(n, cu_seqlens, T, PACKED: gl.constexpr):
    """The first token of sequence n and the token after its last, in its batch row."""
    start, stop = n * 0, n * 0 + T
    if PACKED:
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
def find_segment(slot, length, cu_seqlens, N, T, PACKED: gl.constexpr, prompts=None):
    """The segment in a slot of ``length`` tokens: its sequence, batch row, first token, the sequence's two bounds, its
    number in the sequence, and whether it is the last one. A sequence without tokens has one segment. A slot without a
    segment has no tokens, and is not the last. ``prompts``: only the N sequences of this list have slots, and the first
    result is a number in the list."""
    n = slot // ((T + length - 1) // length)
    first, row = n * ((T + length - 1) // length), n
    if PACKED:
        low, high = slot * 0, slot * 0 + N - 1
        while low < high:  # finds the last sequence whose slots begin here or before
            middle = (low + high + 1) // 2
            if load_bound(cu_seqlens, nth(middle, N, prompts), T) // length + middle <= slot:
                low = middle
            else:
                high = middle - 1
        n, row = low, slot * 0
        first = load_bound(cu_seqlens, nth(n, N, prompts), T) // length + n
    start, stop = extent(nth(n, N, prompts), cu_seqlens, T, PACKED)
    number = gl.maximum(slot - first, 0)  # below 0 if bounds decrease, or begin above 0
    token = start + number * length
    last = (token + length >= stop) & ((token < stop) | (number == 0))
    return n, row, token, start, stop, number, last


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
def find_chunks(HV, length, cu_seqlens, N, T, PACKED: gl.constexpr):
    """This program's segment: its sequence, batch row, the sequence's first token and length, the segment's first token
    in the sequence, the number of its chunks, the first chunk's slot, its number, and whether it ends the sequence."""
    n, row, token, start, stop, number, last = find_segment(place(HV)[0], length, cu_seqlens, N, T, PACKED)
    chunks = (gl.maximum(gl.minimum(length, stop - token), 0) + C - 1) // C
    slot = first_slot(n, start, T, PACKED)
    return n, row, start, stop - start, token - start, chunks, slot + number * (length // C), number, last


@gluon.jit
def find_map(HV, length, cu_seqlens, N, T, PACKED: gl.constexpr, listed=None):
    """The results of `find_chunks` with two changes. There are no chunks if this map is not needed. And instead of
    whether the segment is the last one, it returns whether the map is Phi (1) or B (0). ``listed``: as in
    `find_listed`."""
    keys = 1 - gl.program_id(1)
    if listed is not None:
        return find_listed(HV, cu_seqlens, T, listed, keys)
    else:
        n, row, start, size, token, chunks, slot, number, last = find_chunks(HV, length, cu_seqlens, N, T, PACKED)
        if last | ((number == 0) & (keys > 0)):
            chunks = chunks * 0
        return n, row, start, size, token, chunks, slot, number, keys


@gluon.jit
def find_listed(HV, cu_seqlens, T, listed, keys):
    """Returns the results of `find_map` for part s of the prompts that are cut, with two changes. The first result is
    the part's number among all parts, and the one before the last is its first chunk.

    listed: the list of prompts and that of their parts (plans/prompt_list.py)."""
    prompts, parts = listed
    gdc_wait()  # the kernel that makes the lists has ended
    s, _ = place(HV)
    known = s < gl.load(parts)
    m = gl.where(known, gl.load(parts + 5 * gl.where(known, s, 0) + 5), 0)
    begin, end = gl.load(parts + 5 * m + 2), gl.load(parts + 5 * m + 3)
    n = gl.where(known, gl.load(prompts + 3 * m + 1), 0)
    start, stop = extent(n, cu_seqlens, T, True)
    needed = known & (end * C < stop - start) & ((begin > 0) | (keys == 0))
    slot = first_slot(n, start, T, True) + begin
    return m, m * 0, start, stop - start, begin * C, gl.where(needed, end - begin, 0), slot, begin, keys


@gluon.jit
def without_faded(token, chunks, slot, keys, left):
    """Leaves out chunks that have decayed. Returns, for a map, the first token, the number and the first slot of the
    chunks that it has to scan, and how many chunks come before those. ``left``: how many chunks have not decayed at the
    segment's end. If some have decayed, Phi is zero."""
    skipped = gl.maximum(chunks - left, 0)
    chunks = gl.where((keys > 0) & (skipped > 0), 0, chunks - skipped)
    return token + skipped * C, chunks, slot + skipped, skipped


@gluon.jit
def count_left(rates, hv, HV, slot, chunks, FROM_END: gl.constexpr):
    """How many chunks of a segment, counted from its end or from its start, still have an effect there: they have not
    decayed by 2^-184. After such a decay, numbers below 2^35 are zero in float32. ``slot``: that of the segment's first
    chunk."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, BY_WARP))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, BY_WARP))
    count, decayed, going = chunks * 0, 0.0, chunks > 0
    while going:
        c = count + j
        if FROM_END:
            c = chunks - 1 - c
        at = ((slot + c) * HV + hv).to(gl.int64) * (8 * C) + 7 * C
        gamma = gl.load(rates + at, mask=count + j < chunks, other=1.0)
        bits = gl.log2(gl.maximum(gamma, SMALLEST_NORMAL))
        square = bits[None, :] + gl.zeros([64, 64], gl.float32, BY_WARP)
        before = decayed + gl.sum(gl.where(j[None, :] < i[:, None], square, 0.0), 1)
        left = gl.sum(gl.where((before > FADED) & (count + i < chunks), 1, 0), 0)
        decayed += gl.sum(bits, 0)
        count += left
        going = (left == 64) & (count < chunks)
    return count
