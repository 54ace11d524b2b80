"""What tokens of a chunk do to each other with a decay per channel: tiles, gates and products of 16 tokens.

A tile is [128, 16]. Channels are the rows of accumulators, and each of eight warps has 16 of them. So decayed copies of
keys and queries go into the next product from registers. The other factor is the same for all channels, and waits in
shared memory.

A pair's decay is taken apart at the end of the column's block and at the first token of the row's block:

    k_j e^{G_i - G_j} = e^{G_i - first_I} . e^{first_I - end_J} . (e^{end_J - G_j} k_j)

The factor in the middle is one number per channel. It multiplies products when they are added up. So the keys and
queries of a block are decayed and rounded only once, for all other blocks. What a pair adds to the gates of its two
tokens cancels in the gates before both, up to rounding in float32. If no log decay is above 0, no factor is above 1,
except the middle one of a block with itself, which is as large as the channel falls there. Copies are multiplied by
2^SHIFT, so that neither they nor their products become too small. `deep_part` computes the channels that fall by more
than MILD within a block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flash_delta.kernels.device.gates import BITS, LEAST_DECAY

K = gl.constexpr(128)
MILD = gl.constexpr(110.0)  # bits
SHIFT = gl.constexpr(32.0)
CHANNELS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))  # [128, 16]
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # [128, 64]: a chunk
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16]))  # [128, 32]
OF_CHANNELS = gl.constexpr(gl.SliceLayout(1, CHANNELS))
LEFT = gl.constexpr(gl.DotOperandLayout(0, CHANNELS, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, CHANNELS, 2))  # [16, 16]


@gluon.jit
def load_block(tile, I: gl.constexpr):
    """The tokens of block I of a tile [64, 128], channels first."""
    return tile.slice(16 * I, 16, 0).permute([1, 0]).load(CHANNELS).to(gl.float32)


@gluon.jit
def empty_tile():
    return gl.zeros([K, 16], gl.float32, CHANNELS)


@gluon.jit
def token():
    """The token in the block of every column of a tile, [1, 16]."""
    return gl.arange(0, 16, layout=gl.SliceLayout(0, CHANNELS))[None, :]


@gluon.jit
def places():
    """The numbers of rows and columns of a matrix [16, 16] by which tiles are multiplied."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))[:, None]
    return r, gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT))[None, :]


@gluon.jit
def rounded(x):
    """x as bfloat16 rounds it, in float32. If x were converted there and back, the compiler would not convert two
    numbers at once."""
    return ((x.to(gl.int32, bitcast=True) + 32768) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def operand(x):
    return gl.convert_layout(x.to(gl.bfloat16), LEFT)


@gluon.jit
def sum_over(x, carried, PARTS: gl.constexpr):
    """Sums, in column t of the result, those columns r of x for which ``carried`` has [r, t]. x is split into PARTS of
    8 bits. Their products with zeros and ones are exact. 3 parts are all of x; with fewer, the last part is rounded."""
    ones = gl.where(carried, 1.0, 0.0).to(gl.bfloat16)
    out = empty_tile()
    for _ in gl.static_range(PARTS - 1):
        part = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        out = mma_v2(operand(part), ones, out)
        x -= part
    return mma_v2(operand(x), ones, out)


@gluon.jit
def may_be_deep(tile, gate, RAW_GATE: gl.constexpr):
    """Whether a channel may fall by more than MILD within a block. For raw gates it uses an upper bound of softplus."""
    rate, bias = gate.rate, gate.bias
    most = rate * 0.0
    for I in gl.static_range(4):
        fall = load_block(tile, I)
        if RAW_GATE:
            x = fall + bias[:, None]
            fall = gl.minimum(gl.exp2(x * BITS), gl.maximum(x, 0.0) + 0.7) * rate[:, None]
        else:
            fall = gl.maximum(fall, LEAST_DECAY) * -1.0
        most = gl.maximum(most, gl.sum(fall, 1))
    return gl.max(most, 0) > MILD / BITS


@gluon.jit
def between(aq, ap, z, factor, kd, qe, pe, dP, dL):
    """Adds the gradients from pairs of a row in one block and a column in another, or in the same. aq and ap are those
    of rows before their own decay, the latter with opposite sign. z is that of columns before their own decay. The
    argument ``dL`` contains -dL."""
    rows_of_P, rows_of_L = dP.permute([1, 0]).load(RIGHT), dL.permute([1, 0]).load(RIGHT)
    aq += factor * mma_v2(kd, rows_of_P, empty_tile())
    ap += factor * mma_v2(kd, rows_of_L, empty_tile())
    z += factor * mma_v2(pe, dL.load(RIGHT), mma_v2(qe, dP.load(RIGHT), empty_tile()))
    return aq, ap, z


@gluon.jit
def deep_part(sq, sk, erase, gates, dP, dL, deep, I: gl.constexpr, PART: gl.constexpr):
    """The gradients from pairs within block I, in channels that are ``deep``, and 0 in others. The caller adds them to
    dq (PART 0), dk (1), the terms of dg (2) or dp (3). This is done one part after the other, because registers are
    few, and such chunks are rare. The argument ``dL`` contains -dL. ``erase``: b of the block. Without it p is k, and
    dk has dp.

    The block is halved again and again, and a pair's decay is taken apart where its two tokens part. So no factor is
    above 1, however far a channel falls."""
    r, t = places()
    q, k = gl.where(deep[:, None], load_block(sq, I), 0.0), gl.where(deep[:, None], load_block(sk, I), 0.0)
    p = k if erase is None else k * erase
    out = empty_tile()
    for level in range(5):
        half = (1 << level) >> 1  # 0: a token with itself
        middle, least = (t & -half) | half, gl.minimum(half, 1)
        carried = (((middle < r) & (r <= t)) | ((t < r) & (r <= middle))) & (r < 16 * half)
        e = gl.exp2(sum_over(gates, carried, 2))
        parted, last = ((r ^ t) & -half) == half, half + half - least
        below = parted & (r - t >= least) & (r - t <= last)
        above = parted & (t - r >= least) & (t - r <= last)
        ke = rounded(k * e)
        kb = operand(ke)
        if PART == 0:
            out += e * parted_product(kb, dP.permute([1, 0]), above)
        else:
            qe, pe = rounded(q * e), ke if erase is None else rounded(p * e)
            back = parted_product(operand(qe), dP, below) - parted_product(operand(pe), dL, below)
            erased = parted_product(kb, dL.permute([1, 0]), above)
            if PART == 3:
                out -= e * erased
            elif PART == 1:
                out += e * (back - erased) if erase is None else e * back
            elif erase is None:
                out += qe * parted_product(kb, dP.permute([1, 0]), above) - ke * (back + erased)
            else:
                out += qe * parted_product(kb, dP.permute([1, 0]), above) - ke * back - pe * erased
    return out


@gluon.jit
def parted_product(x, scores, some):
    return mma_v2(x, gl.where(some, scores.load(RIGHT), 0.0).to(gl.bfloat16), empty_tile())
