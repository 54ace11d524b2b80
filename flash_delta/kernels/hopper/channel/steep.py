"""Scores of chunks whose gates fall too far within 16 tokens to be taken apart at one point.

Without a bound a channel may fall by any number of nats from one token to the next. If a channel falls by more than 110
bits in a block of 16 tokens, the scores of this block with itself are computed once more. Its tokens are halved again
and again. The decay of a pair is taken apart where its two tokens part, at the last token of the earlier half. So no
factor is above 1 if no log decay is above 0. There are four levels, and each is one product of 64 rows with 32 columns,
of which the pairs of this level are used.

Warps find out from the sums of blocks whether a chunk needs this. Which rows get these scores depends only on tokens up
to their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flash_delta.kernels.hopper.channel.scores import OWN, both, products, put, take
from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.layouts import NARROW_ROWS, C

# Bits. Sums are monotonous, even after rounding. So if a row is unsafe, its block is found, too.
LOOK = gl.constexpr(-109.5)  # of a block
UNSAFE = gl.constexpr(-55.0)  # of a row's sum, to which 55 was added
CLAMP = gl.constexpr(60.0)  # of a column: only unsafe rows need columns with more
EVERYWHERE = gl.constexpr(gl.BlockedLayout([4, 4], [1, 32], [1, 4], [1, 0]))  # [4, 128], all of it in every warp


@gluon.jit
def is_steep(totals):
    """Whether a block of the chunk falls too far. All warps find the same."""
    return gl.min(gl.min(totals.load(EVERYWHERE), 0), 0) < LOOK


@gluon.jit
def halved(s, level: gl.constexpr):
    """The decay between every token and the last token of the earlier half of its group of 2^(level + 1) tokens."""
    width: gl.constexpr = 2 << level
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    parting = s
    for group in gl.static_range(16 // width):
        last = gl.sum(gl.where(m == group * width + width // 2 - 1, s, -0.0), 1)  # to add -0.0 is no instruction
        parting = gl.where(m // width == group, last.expand_dims(1), parting)
    return gl.exp2(gl.abs(s - parting) * -1.0)


@gluon.jit
def store_halved_scores(tiles, s, erase, exact, lowest, h: gl.constexpr):
    """Stores the scores of each block of half h with itself in ``exact [64, 32]``, and the lowest sum of each row in
    ``lowest``.

    Before the call all warps must have read rows and columns. When it returns, they have read them. q and k are there
    as given. ``erase``: the half's erase gate, if keys erase with b . k.
    """
    sq, sk, rows, columns = tiles.q, tiles.k, tiles.rows, tiles.columns
    low = gl.min(s, 2).reshape([1, 32])
    lowest.slice(0, 32, 1).store(low)
    lowest.slice(32, 32, 1).store(low)
    row = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    token = row % 32
    own = gl.sum(take(sq, h) * take(sk, h), 2).reshape([32])
    own = gl.convert_layout(own, gl.SliceLayout(0, NARROW_ROWS))[None, :]
    scores = gl.where(column == row, own, 0.0)  # q with the key of its own token; rows of k do not use this
    for level in gl.static_range(4):
        decay = halved(s, level)
        kk = take(sk, h) * decay
        put(columns, 0, kk)
        put(rows, 1, kk if erase is None else kk * erase)
        put(rows, 0, take(sq, h) * decay)
        fence_async_shared()
        barrier()  # all warps of the program: rows and columns are there
        product = products(rows, columns)
        product = warpgroup_mma_wait(0, deps=[product])
        found, _ = both(product)
        parted = (token >> level) == ((column >> level) ^ 1)
        later = ((token >> level) & 1) == 1
        scores = gl.where(parted & later, found, scores)
        barrier()  # all warps of the program: the product has read rows and columns
    exact.store(scores)
    barrier()  # all warps of the program: scores are there, which other warps read


@gluon.jit
def with_halved_scores(scores, exact, lowest):
    """Scores [64, 32] of a half with itself, with exact scores in unsafe rows."""
    unsafe = lowest.permute([1, 0]).load(NARROW_ROWS) < UNSAFE
    return gl.where(unsafe, exact.load(NARROW_ROWS), scores)
