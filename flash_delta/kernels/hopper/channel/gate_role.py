"""The role that decays the keys and queries of 32 tokens, so that one product gives all scores.

Decays are taken apart at one point per channel. Let G be the sums of log decays, in bits, from the start of the 32
tokens on, and let u = G - n. If the 32 tokens fall by at most 115 bits, n is 0. Otherwise n is the whole part of the
fall beyond 115 bits, with the sign of G. If they fall by at most 231 bits, u lies within 116 bits of 0, and bfloat16
holds all of

    rows     k 2^u, then q 2^u          columns  k 2^{-u}

With a strength per channel rows have b . k in place of k, and the strength of a token is 1.
States are multiplied by 2^n before (loop.py), and need nothing else. n depends on later tokens. But n is whole, and so
changes numbers only by a power of two. Therefore no token changes a bit of the results of earlier tokens. float32
cannot hold 2^G, so the role computes 2^{G + 114} first.

With a bound of -5 nats 32 tokens never fall by more than 231 bits. **Without a bound** they may fall further. If they
fall further than FALL, they go through all roles in pieces, and each piece has a slot of its own. The first piece ends
before the token with which it would fall further than FALL. The next piece starts there, and so on. In a piece the
tokens of other pieces do not decay, and they have neither b nor a query. Log decays below FADED_DECAY count as
FADED_DECAY, so a piece has 8 tokens or more, except the last one. FALL is not 231 bits, because then a state times 2^n
would lose bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_delta.kernels.device.gates import gate_constants, log_decays
from flash_delta.kernels.hopper.channel.gates import FADED_DECAY, add, rest_living, strength_of, strengths_of
from flash_delta.kernels.hopper.channel.parts import STEP, find_part
from flash_delta.kernels.hopper.channel.roles import Tiles
from flash_delta.kernels.hopper.channel.scores import OWN, K, put, squared_lengths_of_two, take
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.layouts import THREADS
from flash_delta.kernels.hopper.device.rings import wait_free
from flash_delta.kernels.hopper.device.work_items import find_pieces

SUMS = gl.constexpr(gl.SliceLayout(1, OWN))  # [2, 128]: a number for each block of 16, and channel
CHANNELS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128]
EVERYWHERE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # [1, 128], all of it in every warp
# Bits.
FALL = gl.constexpr(-200.0)  # of 32 tokens without a bound, or of a piece of them
LOW = gl.constexpr(-115)  # of u
UP = gl.constexpr(114)  # added to exponents of 2, and subtracted again


@gluon.jit
def constants_of_head(hv, A_log, dt_bias, bound, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """The numbers of a value head that `log_decays` needs."""
    c = gl.arange(0, K, layout=gl.SliceLayout(0, SUMS))
    A, bias = bound * 0.0, gl.full([K], 0.0, gl.float32, gl.SliceLayout(0, SUMS))
    if A_log is not None:
        A = gl.load(A_log + hv).to(gl.float32)
    if dt_bias is not None:
        bias = gl.load(dt_bias + hv * K + c).to(gl.float32)
    return gate_constants(A, bias, bound if BOUNDED else FADED_DECAY, RAW_GATE, BOUNDED)


@gluon.jit
def load_strengths(gate, row, hv, start, token, length):
    """beta of 32 tokens as given, twice; 0 after the sequence's end. Without beta it is 1."""
    i = gl.arange(0, 2 * STEP, layout=THREADS) % STEP
    b = gl.full([2 * STEP], 1.0, gl.float32, THREADS)
    if gate.beta is not None:
        of_token, of_head = gate.beta_strides
        at = ((i * 0).to(gl.int64) + row) * gate.beta_batch + (start + token + i).to(gl.int64) * of_token
        b = gl.load(gate.beta + (at + hv * of_head), mask=token + i < length, other=0.0).to(gl.float32)
    return b


@gluon.jit
def is_in(i, first, end):
    return (i >= first) & (i < end)


@gluon.jit
def store_vectors(
    tiles, norms, strengths, b, first, end, gate, NORM: gl.constexpr, RAW_BETA: gl.constexpr, PIECE: gl.constexpr
):  # fmt: skip
    """Stores norms of k, and then those of q with the scale; and b, twice. For tokens before ``first`` and from ``end``
    on b is 0. In a piece their norms of q are 0, too."""
    scale = gate.scale
    both = gl.arange(0, 2 * STEP, layout=THREADS)
    if tiles.b is None:
        b = strength_of(b, gate.beta_top, RAW_BETA)
    strengths.store(gl.where(is_in(both % STEP, first, end), b, 0.0).reshape([1, 2 * STEP]))
    if NORM:
        lengths = gl.rsqrt(squared_lengths_of_two(tiles.k, tiles.q) + 1e-6)
        of_q = gl.arange(0, 2, layout=gl.SliceLayout(1, lengths.type.layout))[:, None] == 1
        i = gl.arange(0, STEP, layout=gl.SliceLayout(0, lengths.type.layout))[None, :]
        lengths *= gl.where(of_q, gl.where(is_in(i, first, end), scale, 0.0) if PIECE else scale, 1.0)
        norms.store(lengths.reshape([1, 2 * STEP]))
    else:
        of_q = gl.where(is_in(both % STEP, first, end), scale, 0.0) if PIECE else scale
        norms.store(gl.where(both < STEP, 1.0, of_q).reshape([1, 2 * STEP]))


@gluon.jit
def sum_blocks(
    sg, totals, constants, first, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr, PIECE: gl.constexpr
):  # fmt: skip
    """The sums of log decays from each block's start. ``totals`` gets those of whole blocks. With PIECE tokens before
    ``first`` do not decay."""
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    decay = log_decays(take(sg, 0), constants, RAW_GATE, BOUNDED)
    if PIECE:
        start = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None].expand_dims(1) * 16
        decay = gl.where(m + start >= first, decay, 0.0)
    s = gl.associative_scan(decay, 1, add)
    totals.store(gl.sum(gl.where(m == 15, s, -0.0), 1))  # to add -0.0 is no instruction
    return s


@gluon.jit
def cut(s, totals, end):
    """The sums as if tokens from ``end`` on did not decay. ``totals`` gets those of whole blocks."""
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    block = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None].expand_dims(1)
    count = gl.where(block == 0, gl.minimum(end, 16), end - 16)
    last = gl.sum(gl.where(m == count - 1, s, -0.0), 1)
    totals.store(last)
    return gl.maximum(s, last.expand_dims(1))


@gluon.jit
def power(n):
    """2^n for n in int32, if this is a normal number of float32."""
    return ((n + 127) * (1 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def both_totals(totals, layout: gl.constexpr):
    return totals.slice(0, 1, 0).load(layout), totals.slice(1, 1, 0).load(layout)


@gluon.jit
def before(total, rest):
    """n, from the totals of both blocks."""
    return gl.minimum((total + rest).to(gl.int32) - LOW, 0)


@gluon.jit
def store_tiles(tiles, s, totals, rows, columns, beta_top, RAW_BETA: gl.constexpr):
    """Stores rows and columns. There is one store for all rows, because a second one would wait for the first."""
    first = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None] == 0
    total, rest = both_totals(totals, SUMS)
    n = before(total, rest) + UP
    s += (gl.where(first, 0.0, total) + UP * 1.0).expand_dims(1)
    e, kk = gl.exp2(s) * power(n * -1).expand_dims(1), take(tiles.k, 0)
    put(columns, 0, kk * (gl.exp2(s * -1.0) * power(n).expand_dims(1)))
    if tiles.b is not None:
        kk *= strengths_of(take(tiles.b, 0), beta_top, RAW_BETA)
    k, q = (kk * e).to(rows.dtype), (take(tiles.q, 0) * e).to(rows.dtype)
    rows.store(gl.join(k, q).permute([3, 0, 1, 2]).reshape([2 * STEP, K]))


@gluon.jit
def store_decays(totals, lead, trail):
    """Stores the factors of states: ``lead``, which is 2^n, before the tokens, and ``trail`` after them."""
    total, rest = both_totals(totals, CHANNELS)
    n = before(total, rest)
    lead.store(power(n))
    trail.store(gl.exp2(total + rest - n.to(gl.float32)))


@gluon.jit
def falls_too_far(totals):
    """Whether a channel falls further than FALL in the 32 tokens. All warps find the same."""
    total, rest = both_totals(totals, EVERYWHERE)
    return gl.min(gl.min(total + rest, 0), 0) < FALL


@gluon.jit
def find_end(s, totals, first):
    """The token after the piece that begins with token ``first``. ``s``: the sums from ``first`` on."""
    late = gl.arange(0, 2, layout=gl.SliceLayout(1, SUMS))[:, None] > 0
    s += gl.where(late, totals.slice(0, 1, 0).load(SUMS), 0.0).expand_dims(1)
    return gl.maximum(gl.sum(gl.where(gl.min(s, 2).reshape([STEP]) < FALL, 0, 1), 0), first + 1)


@gluon.jit
def store_piece(tiles, made, x, s, first, totals, left, b, gate, NORM: gl.constexpr, RAW_BETA: gl.constexpr):
    """Makes all of the piece that begins with token ``first``, in slot x. ``s``: the sums from ``first`` on. Returns
    the token after the piece."""
    end = find_end(s, totals, first)
    barrier()  # all warps of the gate group: they have read sums
    s = cut(s, totals, end)
    norms, strengths = made.norms.index(x), made.strengths.index(x)
    store_vectors(tiles, norms, strengths, b, first, gl.minimum(left, end), gate, NORM, RAW_BETA, True)
    barrier()  # all warps of the gate group: sums of blocks are there
    store_tiles(tiles, s, totals, made.rows.index(x), made.columns.index(x), gate.beta_top, RAW_BETA)
    store_decays(totals, made.lead.index(x), made.trail.index(x))
    store_flag(made.flags.index(x), end == STEP)
    return end


@gluon.jit
def store_flag(flag, last):
    """Stores whether a slot has the last piece of 32 tokens."""
    flag.store(gl.full([1], 0, gl.int32, THREADS) + gl.where(last, 1, 0))


@gluon.jit
def is_last(flag):
    return gl.max(flag.load(THREADS), 0) == 1


@gluon.jit
def gate_role(
    totals, given, made, bars, gate, work, HV, NORM: gl.constexpr, RAW_GATE: gl.constexpr,
    BOUNDED: gl.constexpr, RAW_BETA: gl.constexpr,
):  # fmt: skip
    """Makes the factors of each step except A and P. ``given``: `Tiles`. ``made``: `StepFactors`. ``gate``:
    `GateParameters`."""
    NR: gl.constexpr = given.q.shape[0]
    NX: gl.constexpr = made.rows.shape[0]
    y, t = 0, 0
    pieces = find_pieces(work, HV)
    for piece in range(pieces.begin, pieces.end, pieces.step):
        part = find_part(piece, pieces, work, HV)
        n, hv, start, length = part.n, part.hv, part.start, part.size
        if work.cu_seqlens is not None:
            n = n * 0
        constants = constants_of_head(hv, gate.A_log, gate.dt_bias, gate.bound, RAW_GATE, BOUNDED)
        b = load_strengths(gate, n, hv, start, part.first, length)
        for token in range(part.first, part.end, STEP):
            if BOUNDED:
                y = t  # a number less to keep
            s, x = y % NR, t % NX
            erasing = None if given.b is None else given.b.index(s)
            tiles, left = Tiles(given.q.index(s), given.k.index(s), given.g.index(s), erasing), length - token
            mbarrier.wait(bars.g_full.index(s), (y // NR) & 1)  # signalled by the copy engine: g is there
            if RAW_GATE:  # noqa: SIM102 (a constant). Given log decays are zeros there
                if left < STEP:
                    rest_living(tiles.g, left)
            sums = sum_blocks(tiles.g, totals, constants, 0, RAW_GATE, BOUNDED, False)
            mbarrier.wait(bars.full.index(s), (y // NR) & 1)  # signalled by the copy engine: q and k are there
            wait_free(bars.done, t, NX, NX)  # signalled by the state group, which has read this slot
            norms, strengths = made.norms.index(x), made.strengths.index(x)
            rows, columns = made.rows.index(x), made.columns.index(x)
            store_vectors(tiles, norms, strengths, b, 0, left, gate, NORM, RAW_BETA, False)
            barrier()  # all warps of the gate group: sums of blocks are there
            if BOUNDED:
                store_tiles(tiles, sums, totals, rows, columns, gate.beta_top, RAW_BETA)
                store_decays(totals, made.lead.index(x), made.trail.index(x))
            elif falls_too_far(totals):
                first, end = left * 0, left * 0
                while end < STEP:
                    end = store_piece(tiles, made, t % NX, sums, first, totals, left, b, gate, NORM, RAW_BETA)
                    first = end
                    if end < STEP:
                        fence_async_shared()
                        barrier()  # all warps of the gate group: a piece is there, and they have read sums
                        mbarrier.arrive(bars.tiled.index(t % NX), count=1)
                        t += 1
                        wait_free(bars.done, t, NX, NX)  # signalled by the state group, which has read this slot
                        sums = sum_blocks(tiles.g, totals, constants, end, RAW_GATE, False, True)
                        barrier()  # all warps of the gate group: sums of blocks are there
            else:
                store_tiles(tiles, sums, totals, rows, columns, gate.beta_top, RAW_BETA)
                store_decays(totals, made.lead.index(x), made.trail.index(x))
                store_flag(made.flags.index(x), True)
            b = load_strengths(gate, n, hv, start, token + STEP, length)
            fence_async_shared()
            barrier()  # all warps of the gate group: they have read q, k and sums
            mbarrier.arrive(bars.left.index(s), count=1)
            mbarrier.arrive(bars.tiled.index(t % NX), count=1)
            y += 1
            t += 1
