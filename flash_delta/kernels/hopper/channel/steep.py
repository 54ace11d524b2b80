"""Chunks whose gates fall further within 16 tokens than a point in their middle can bear.

Without a bound a channel may fall by any number of nats from one token to the next. Beyond 110 bits in a block of 16
the scores of that block with itself are made once more: its tokens are halved again and again, and a pair's decay is
taken apart where its two tokens part, at the last token of the earlier half. So no factor is above 1. For each of four
levels that is one product of 64 rows with 32 columns, whose pairs are those of that level.

Whether a chunk needs it, its warps find out from the sums over its blocks. Which rows get these scores depends only on
tokens up to their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flash_delta.kernels.hopper.channel.scores import OWN, both, products, put, take
from flash_delta.kernels.hopper.gluon_compat import barrier
from flash_delta.kernels.hopper.layouts import NARROW_ROWS, C

# Bits. Sums are monotonous, and so are their roundings: where a row is unsafe, its block is looked at.
LOOK = gl.constexpr(-109.5)  # of a block
UNSAFE = gl.constexpr(-55.0)  # of a row's sum, which has been moved up by 55
CLAMP = gl.constexpr(60.0)  # of a column: those that would have more belong to unsafe rows only
EVERYWHERE = gl.constexpr(gl.BlockedLayout([4, 4], [1, 32], [1, 4], [1, 0]))  # [4, 128], all of it in every warp


@gluon.jit
def is_steep(totals):
    """Whether a block of the chunk falls too far; all warps find the same."""
    return gl.min(gl.min(totals.load(EVERYWHERE), 0), 0) < LOOK


@gluon.jit
def halved(s, level: gl.constexpr):
    """The decay of every token from, or up to, the last token of the earlier half of its 2^(level + 1) tokens."""
    width: gl.constexpr = 2 << level
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    parting = s
    for group in gl.static_range(16 // width):
        last = gl.sum(gl.where(m == group * width + width // 2 - 1, s, -0.0), 1)  # to add -0.0 is no instruction
        parting = gl.where(m // width == group, last.expand_dims(1), parting)
    return gl.exp2(gl.abs(s - parting) * -1.0)


@gluon.jit
def store_halved_scores(tiles, s, exact, lowest, h: gl.constexpr):
    """The scores of each block of half h with itself: ``exact [64, 32]``, and its rows' lowest sums, ``lowest``.

    Before the call all warps must have left rows and columns, and after it they have. q and k are there as given.
    """
    sq, sk, _, rows, columns, _ = tiles
    low = gl.min(s, 2).reshape([1, 32])
    lowest.slice(0, 32, 1).store(low)
    lowest.slice(32, 32, 1).store(low)
    row = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW_ROWS))[:, None]
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, NARROW_ROWS))[None, :]
    token = row % 32
    own = gl.sum(take(sq, h) * take(sk, h), 2).reshape([32])
    own = gl.convert_layout(own, gl.SliceLayout(0, NARROW_ROWS))[None, :]
    scores = gl.where(column == row, own, 0.0)  # q with its own token's key; for rows of k that does not count
    for level in gl.static_range(4):
        decay = halved(s, level)
        kk = take(sk, h) * decay
        put(columns, 0, kk)
        put(rows, 1, kk)
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
    barrier()  # all warps of the program: it reads what others have written


@gluon.jit
def with_halved_scores(scores, exact, lowest):
    """Scores [64, 32] of a half with itself, of which unsafe rows get those that are exact."""
    unsafe = lowest.permute([1, 0]).load(NARROW_ROWS) < UNSAFE
    return gl.where(unsafe, exact.load(NARROW_ROWS), scores)
