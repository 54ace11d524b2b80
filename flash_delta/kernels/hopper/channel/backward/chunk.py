"""The gradients of a chunk's tokens, from products over values, with a decay per channel. It takes 16 tokens at a time,
from right to left (blocks.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.device.gates import gate_backward_of_rows, log_decays_of_rows
from flash_delta.kernels.hopper.channel.backward.blocks import (
    CHANNELS,
    HALF,
    MILD,
    SHIFT,
    between,
    deep_part,
    empty_tile,
    load_block,
    operand,
    places,
    rounded,
    sum_over,
    token,
)
from flash_delta.kernels.hopper.channel.backward.parking import park, parked
from flash_delta.kernels.hopper.channel.gates import strength_back, strengths_of
from flash_delta.kernels.hopper.device.state_copies import apart_all, beside_all

PARKED_SUMS = gl.constexpr(2)  # the first so many blocks park their sums of gates


@gluon.jit
def tiles_of(x):
    """[128, 64] as the tiles of four blocks."""
    a, b, c, d = apart_all(x, 4)
    return (
        gl.convert_layout(a, CHANNELS), gl.convert_layout(b, CHANNELS), gl.convert_layout(c, CHANNELS),
        gl.convert_layout(d, CHANNELS),
    )  # fmt: skip


@gluon.jit
def last_tile(x, parking, first: gl.constexpr):
    """The last tile of x [128, 64]. The others are parked, from place ``first`` on."""
    tiles = tiles_of(x)
    for I in gl.static_range(3):
        park(parking, first + I, tiles[I])
    return tiles[3]


@gluon.jit
def line_of(lines, n: gl.constexpr, I: gl.constexpr):
    """Line n for the tokens of block I, [1, 16]."""
    return lines.index(n).slice(16 * I, 16, 1).load(CHANNELS)


@gluon.jit
def gates_of(sg, I: gl.constexpr, left, gate, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """Activations of a block, their log decays, and which of its tokens are in the sequence."""
    a, live = load_block(sg, I), token() < left - 16 * I
    return a, log_decays_of_rows(a, live, gate.rate, gate.bias, gate.bound, RAW_GATE, BOUNDED), live


@gluon.jit
def decayed_keys(sk, sg, W, shift, parking, lines, left, gate, RAW_GATE: gl.constexpr, BOUNDED: gl.constexpr):
    """Scans the blocks from right to left. Returns for every block:

    * the sums of gates after its first token (for the first blocks they are parked)
    * the keys, decayed to the end of the block
    * the gradient of keys as they write to the state after the chunk, decayed from there to the end of the block
    * the gate of the first token
    * the sum of the other gates

    Then the sum over all tokens of k times the gradient of what it writes, and the sum of all gates."""
    r, t = places()
    written = tiles_of(W)
    sums, keys, z, opens, falls = (), (), (), (), ()
    D, all_written = gl.sum(empty_tile(), 1), empty_tile()
    for I in gl.static_range(3, -1, -1):
        _, gates, _ = gates_of(sg, I, left, gate, RAW_GATE, BOUNDED)
        s = sum_over(gates, (r > 0) & (r <= t), 2)
        # Log decays as given may be above 0. Of a raw gate all sums fall, and the least one takes fewer registers.
        fall, first = gl.min(s, 1) if RAW_GATE else column_of(s, 15), column_of(gates, 0)
        k = rounded(load_block(sk, I) * gl.exp2((fall + SHIFT)[:, None] - s))
        w = written[I] * line_of(lines, 2, I) * gl.exp2(D - shift)[:, None]
        all_written += k * w
        D += first + fall
        if I < PARKED_SUMS:
            park(parking, 6 + I, s)
        else:
            sums = (s,) + sums  # noqa: RUF005 (Gluon knows no star)
        keys, z = (operand(k),) + keys, (w,) + z  # noqa: RUF005
        opens, falls = (first,) + opens, (fall,) + falls  # noqa: RUF005
    return sums, keys, z, opens, falls, gl.sum(all_written, 1), D


@gluon.jit
def column_of(x, t: gl.constexpr):
    return gl.sum(gl.where(token() == t, x, 0.0), 1)


@gluon.jit
def reach(opens, falls, I: gl.constexpr, J: gl.constexpr):
    """The sum of gates from the end of block J to the first token of block I."""
    D = opens[I]
    for m in gl.static_range(J + 1, I):
        D += opens[m] + falls[m]
    return D


@gluon.jit
def chunk_gradients(
    X, Y, W, through, shift, sq, sk, sg, sb, sP, sM, parking, lines, left, gate, beta_top, NORM: gl.constexpr,
    RAW_GATE: gl.constexpr, RAW_BETA: gl.constexpr, BOUNDED: gl.constexpr, DEEP: gl.constexpr,
):  # fmt: skip
    """Overwrites q, k and g with their gradients, and b if keys erase with b . k. Returns the gradients of A_log and of
    biases. DEEP: a channel may fall by more than MILD within a block."""
    r, t = places()
    read, erase = last_tile(X, parking, 0), last_tile(Y, parking, 3)
    sums, keys, z, opens, falls, rest, D = decayed_keys(sk, sg, W, shift, parking, lines, left, gate, RAW_GATE, BOUNDED)
    rest += through * gl.exp2(D - shift + SHIFT)
    dA, dbias = rest * 0.0, rest * 0.0
    for I in gl.static_range(3, -1, -1):
        if I < 3:
            read, erase = parked(parking, I), parked(parking, 3 + I)
        s = parked(parking, 6 + I) if I < PARKED_SUMS else sums[I - PARKED_SUMS]
        fall, kd = falls[I], gl.convert_layout(keys[I], CHANNELS).to(gl.float32)
        e, q, k = gl.exp2(s + SHIFT), load_block(sq, I), load_block(sk, I)
        b, p = None, k
        if sb is not None:
            b = strengths_of(load_block(sb, I), beta_top, RAW_BETA)
            p = k * b
        q_rows, p_rows = rounded(q * e), rounded(p * (e * -1.0))
        qe, pe, start = operand(q_rows), operand(p_rows), gl.exp2(reach(opens, falls, I, -1) - SHIFT)[:, None]
        aq, ap = read * line_of(lines, 0, I) * start, erase * line_of(lines, 1, I) * start
        grown = gl.exp2(fall * -1.0 - 2.0 * SHIFT)
        if DEEP:
            grown = gl.where(fall < -MILD, 0.0, grown)
        aq, ap, own = between(
            aq, ap, z[I], grown[:, None], keys[I], qe, pe, sP.index(5 * I), sM.index(5 * I)
        )  # fmt: skip
        earlier = ()
        for J in gl.static_range(I):
            factor = gl.exp2(reach(opens, falls, I, J) - 2.0 * SHIFT)[:, None]
            aq, ap, zj = between(
                aq, ap, z[J], factor, keys[J], qe, pe, sP.index(4 * I + J), sM.index(4 * I + J)
            )  # fmt: skip
            earlier += (zj,)
        z = earlier
        if b is None:
            dq, dk = e * aq, gl.exp2((fall + SHIFT)[:, None] - s) * own - e * ap
        else:
            dq, dk, dp = e * aq, gl.exp2((fall + SHIFT)[:, None] - s) * own, e * ap * -1.0
        y = q_rows * aq + p_rows * ap - kd * own
        a, gates, live = gates_of(sg, I, left, gate, RAW_GATE, BOUNDED)
        if DEEP:
            own_P, own_M = sP.index(5 * I), sM.index(5 * I)
            dq += deep_part(sq, sk, b, gates, own_P, own_M, fall < -MILD, I, 0)
            dk += deep_part(sq, sk, b, gates, own_P, own_M, fall < -MILD, I, 1)
            y += deep_part(sq, sk, b, gates, own_P, own_M, fall < -MILD, I, 2)
            if b is not None:
                dp += deep_part(sq, sk, b, gates, own_P, own_M, fall < -MILD, I, 3)
        if b is not None:
            dk += b * dp
            db = strength_back(k * dp, b, beta_top, RAW_BETA)
            sb.slice(16 * I, 16, 0).permute([1, 0]).store(db.to(sb.dtype))
        d = sum_over(y, r >= t, 3) + rest[:, None]
        rest += gl.sum(y, 1)
        if RAW_GATE:
            d, of_A_log = gate_backward_of_rows(d, gates, a, live, gate.rate, gate.bias, BOUNDED)
            dA += gl.sum(of_A_log, 1)
            dbias += gl.sum(d, 1)
        elif BOUNDED:
            d = gl.where(a < gate.bound, 0.0, d)
        sg.slice(16 * I, 16, 0).permute([1, 0]).store(d.to(sg.dtype))
        if NORM and I < 3:  # in the places of the products
            park(parking, I, dq)
            park(parking, 3 + I, dk)
        elif NORM:
            last_dq, last_dk = dq, dk
        else:
            sq.slice(16 * I, 16, 0).permute([1, 0]).store(dq.to(sq.dtype))
            sk.slice(16 * I, 16, 0).permute([1, 0]).store(dk.to(sk.dtype))
    if NORM:
        store_normed(sq, parking, 0, last_dq, lines.index(4))
        store_normed(sk, parking, 3, last_dk, lines.index(5))
    return dA, dbias


@gluon.jit
def store_normed(tile, parking, first: gl.constexpr, last, square):
    """Overwrites x with ``z - x r^2 <x, z>``. ``square`` is r^2. z is three tiles that are parked from ``first`` on,
    and ``last``. It takes half of the tokens at a time: a sum for all of them needs 2 KB of shared memory, and 1 KB is
    left."""
    for h in gl.static_range(2):
        parts = parked(parking, first + 2 * h), last if h == 1 else parked(parking, first + 1)
        half = tile.slice(32 * h, 32, 0).permute([1, 0])
        z, x = gl.convert_layout(beside_all(parts, 0, 2), HALF), half.load(HALF).to(gl.float32)
        along = gl.sum(x * z, 0)[None, :] * square.slice(32 * h, 32, 1).load(HALF)
        half.store((z - x * along).to(tile.dtype))
