"""Finds the tokens of a chunk, without a plan in memory.

Every sequence begins a new chunk, so a packed batch of T tokens in N sequences has at most T // C + N chunks.
Sequence n has its chunks in the slots from ``cu_seqlens[n] // C + n`` on. There are always enough slots before those of
the next sequence. A program finds the chunk of its slot by itself. A grid has as many slots as there can be chunks. A
slot without a chunk has no tokens. Tokens after the last sequence count as one more sequence, N, and get zeros.

Segments, which are runs of whole chunks, are found in the same way.
"""

import triton
import triton.language as tl

from flash_delta.problem import Problem

C = 64  # tokens of a chunk, in every kernel
UNIT = 8  # numbers; rows of the workspace are whole units, since the copy engine needs multiples of 16 bytes


@triton.constexpr_function
def pitch(width):
    """The stride of rows of ``width`` numbers in the workspace. Kernels write zeros between them."""
    return -(-width // UNIT) * UNIT


@triton.constexpr_function
def whole_rows(V):
    """Rows of a head's state in the workspace. They fill tiles of up to 128 rows, since the copy engine stores whole
    tiles: rows after the last one of a head would be those of the next head."""
    return max(16, triton.next_power_of_2(V)) if V <= 128 else -(-V // 128) * 128


def count_slots(problem: Problem, length: int = C) -> int:
    """The greatest number of chunks, or of segments of ``length`` tokens, that there can be, with those after the last
    sequence."""
    T = problem.T
    return T // length + problem.N + 1 if problem.packed else problem.N * -(-T // length)


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Waits until the kernel before this one has ended. Then its results can be read, and its inputs may be
    overwritten.

    With OVERLAP a program may start while the kernel launched before its own still runs (programmatic dependent
    launch). Before this call a program must not read what kernels of the same call write. It must write nothing except
    descriptors, to memory that no kernel of the call still uses. The memory of a kernel's descriptors is free again as
    soon as that kernel is launched, and the next kernel may get it. So of two kernels with descriptors the second must
    not come directly after the first, and the kernel between them must not ``lead``.

    If kernel C waits for kernel B, and B has waited for kernel A, then C has waited for A, too. If B has not waited, A
    may still run. So programs that find nothing to do also call this if all programs of their kernel may find nothing:
    all sequences may be SHORT.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def lead(OVERLAP: tl.constexpr):
    """The next kernel's programs may start once all programs of this kernel have called this."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_bound(cu_seqlens, n, known, T):
    """The token at which sequence n begins, and the one before it ends; 0 for sequences that are not ``known``.

    The host never reads these bounds, so it cannot check them. Wrong ones are moved into the row, 0 <= bound <= T,
    before they become 32-bit numbers. Results are then undefined, but no kernel reads or writes outside of its
    tensors.
    """
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=known, other=0), 0), T).to(tl.int32)


@triton.jit
def bounds(n, cu_seqlens, N, T, C, PACKED: tl.constexpr):
    """The first token of sequence n, the one after its last, both in its batch row, and its first slot."""
    start, stop, slot = n * 0, n * 0 + T, n * ((T + C - 1) // C)
    if PACKED:
        start = load_bound(cu_seqlens, n, n <= N, T)
        stop = tl.maximum(tl.where(n < N, load_bound(cu_seqlens, n + 1, n < N, T), T), start)
        slot = start // C + n
    return start, stop, slot


@triton.jit
def find_slot(slot, cu_seqlens, N, T, C, PACKED: tl.constexpr):
    """Returns, for a slot of C tokens, its sequence, its batch row, the sequence's first token and end, and the slot's
    number in the sequence."""
    if PACKED:
        row, n = slot * 0, slot * 0 - 1
        for i in range(0, N + 1, 128):
            at = i + tl.arange(0, 128)
            first = load_bound(cu_seqlens, at, at <= N, T) // C + at
            n += tl.sum(((first <= slot) & (at <= N)).to(tl.int32))
        n = tl.maximum(n, 0)  # below 0 if the first bound is not 0
    else:
        n = slot // ((T + C - 1) // C)
        row = n
    start, stop, first_slot = bounds(n, cu_seqlens, N, T, C, PACKED)
    return n, row, start, stop, tl.maximum(slot - first_slot, 0)  # below 0 if bounds decrease, or begin above 0


@triton.jit
def find_chunk(slot, cu_seqlens, N, T, C: tl.constexpr, PACKED: tl.constexpr, SHORT: tl.constexpr = 0):
    """Returns, for a slot, its sequence, its batch row, the chunk's first token and the sequence's end. There is no
    chunk if ``token >= stop``.

    Sequences of up to SHORT tokens have no chunks: `decode` runs them.
    """
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, C, PACKED)
    token = start + number * C
    if SHORT > 0:
        token = tl.where(stop - start <= SHORT, stop, token)
    return n, row, token, stop


@triton.jit
def enter_chunk(
    cu_seqlens, N, T, C: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr, PARTS: tl.constexpr = 1
):
    """The beginning of most programs of the backward pass. They wait for the kernel before theirs, and find their
    chunk.

    The grid is (slots * PARTS, heads). Returns the slot, the head, the batch row, the chunk's first token, the end of
    its sequence, and whether the slot is empty. If it is, the program stores zeros and ends. Tokens after the last
    sequence get these zeros. If a slot has no chunk at all, no row is stored.
    """
    lead(OVERLAP)
    follow(OVERLAP)
    slot, head = tl.program_id(0) // PARTS, tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED)
    return slot, head, row, token, stop, PACKED and ((token >= stop) | (n >= N))


@triton.jit
def find_segment(slot, length, cu_seqlens, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Finds the segment in a slot of ``length`` tokens.

    Returns its sequence, its batch row, its first token, its end, the slot of its first chunk, its number in the
    sequence, and whether it is the last one there. A sequence without tokens has one segment. A slot without a segment
    has no tokens, and is not the last one.
    """
    n, row, start, stop, number = find_slot(slot, cu_seqlens, N, T, length, PACKED)
    _, _, chunk = bounds(n, cu_seqlens, N, T, C, PACKED)
    token = start + number * length
    end = token + length
    last = (end >= stop) & ((token < stop) | (number == 0))
    chunk += number * (length // C)
    return n, row, tl.minimum(token, stop), tl.minimum(end, stop), chunk, number, last


@triton.jit
def steps(number, strides, axis: tl.constexpr):
    """``number`` steps along an axis, in elements. Tells the compiler their unit, ``strides[4]``, if there is one.

    Triton knows which strides are multiples of 16, and treats all others as odd (arguments.strides). Functions have to
    pass ``strides`` on as a whole: assigned to another name, the unit is no longer a constant.
    """
    elements = number * strides[axis]
    if len(strides) < 5 or strides[4] % 16 < 2:
        return elements
    else:
        return tl.multiple_of(elements, strides[4])


@triton.jit
def rows_of(x, strides, row, head):
    """Pointer to the tokens of one head in one batch row. Strides are in elements: (batch, token, head, channel)."""
    return x + steps(row.to(tl.int64), strides, 0) + steps(head.to(tl.int64), strides, 2)


@triton.jit
def matrix(x, strides, stop, width, C: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """The argument of ``load_tile`` and ``store_tile``: a pointer to one head, or a descriptor of its rows before
    ``stop``.

    With a descriptor, Hopper's copy engine moves whole tiles and clips them at the end of the sequence. It needs 16-bit
    elements, rows of consecutive channels, and a pointer and strides that are multiples of 16 bytes
    (arguments.fits_tma).
    """
    if TMA:
        return tl.make_tensor_descriptor(x, shape=[stop, width], strides=[strides[1], 1], block_shape=[C, W])
    else:
        return x


@triton.jit
def sees(i, j, STEPS: tl.constexpr):
    """Whether the query in row i reads what row j writes, [C, C]. With STEPS it reads all rows of its own token, of
    which i is the first."""
    if STEPS == 1:
        return i[:, None] >= j[None, :]
    else:
        return (i | (STEPS - 1))[:, None] >= j[None, :]


@triton.jit
def load_tile(
    x, strides, token, stop, column, width, C: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr = False,
    STEPS: tl.constexpr = 1,
):  # fmt: skip
    """Loads ``[C, W]`` from a token and a column on. Numbers from row ``stop`` and column ``width`` on are 0.

    With STEPS the tensor has a row for so many rows of k (`Problem.steps`). It is the first of them, and the others are
    0. Tokens are those of k, and chunks are multiples of STEPS.
    """
    if TMA:
        return x.load([token, column])
    else:
        i, c = token + tl.arange(0, C), column + tl.arange(0, W)
        place = i if STEPS == 1 else i // STEPS
        at = steps(place.to(tl.int64), strides, 1)[:, None] + c[None, :] * strides[3]
        known = i < stop if STEPS == 1 else (i < stop) & (i % STEPS == 0)
        return tl.load(x + at, mask=known[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def reciprocal_lengths(
    x, strides, token, stop, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr = 1
):  # fmt: skip
    """``(sum x^2 + eps)^{-1/2}`` of the rows of a chunk, [C]. STEPS: as in `load_tile`."""
    squares = tl.zeros([C, W], tl.float32)
    for column in range(0, K, W):
        tile = load_tile(x, strides, token, stop, column, K, C, W, False, STEPS).to(tl.float32)
        squares += tile * tile
    return tl.rsqrt(tl.sum(squares, 1) + 1e-6)


@triton.jit
def store_tile(
    x, strides, tile, token, stop, column, width, C: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr = False,
    STEPS: tl.constexpr = 1,
):  # fmt: skip
    """Stores a tile of ``load_tile``. Nothing is written from row ``stop`` and column ``width`` on."""
    if TMA:
        x.store([token, column], tile)
    else:
        i, c = token + tl.arange(0, C), column + tl.arange(0, W)
        place = i if STEPS == 1 else i // STEPS
        at = steps(place.to(tl.int64), strides, 1)[:, None] + c[None, :] * strides[3]
        known = i < stop if STEPS == 1 else (i < stop) & (i % STEPS == 0)
        tl.store(x + at, tile, mask=known[:, None] & (c < width)[None, :])


@triton.jit
def load_row(x, strides, token, stop, C: tl.constexpr, STEPS: tl.constexpr = 1):
    """Loads ``[C]`` in float32, one number per token, such as gates and strengths. STEPS: as in `load_tile`."""
    i = token + tl.arange(0, C)
    at = x + (i if STEPS == 1 else i // STEPS).to(tl.int64) * strides[1]
    known = i < stop if STEPS == 1 else (i < stop) & (i % STEPS == 0)
    return tl.load(at, mask=known, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, strides, row, token, stop, C: tl.constexpr, STEPS: tl.constexpr = 1):
    i = token + tl.arange(0, C)
    at, number = x + (i if STEPS == 1 else i // STEPS).to(tl.int64) * strides[1], row.to(x.dtype.element_ty)
    tl.store(at, number, mask=i < stop if STEPS == 1 else (i < stop) & (i % STEPS == 0))


@triton.jit
def load_block(x, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """Loads ``[BH, BW]`` of a contiguous matrix [HEIGHT, WIDTH], 0 outside. Blocks that divide it need no masks."""
    r, c = tl.arange(0, BH), tl.arange(0, BW)
    at = x + row * WIDTH + column + r[:, None] * WIDTH + c[None, :]
    if HEIGHT % BH == 0 and WIDTH % BW == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row + r < HEIGHT)[:, None] & (column + c < WIDTH)[None, :], other=0.0)
