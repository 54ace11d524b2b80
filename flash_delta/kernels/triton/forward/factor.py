"""Stage ``scores``, and from it and ``solve`` each chunk's map of the state. The scan then only applies this map.

    Y = P A        P_ij = scale q_i . k_j e^{G_i - G_j},  i >= j (`sees`)
    X = A^T Kd     Kd = k e^{G_C - G}

Norms are applied to k and decays to A, so that A is not rounded a second time where there is no decay (products.py).

Writes X ``[slots, HV, C, K']`` and Y ``[slots, HV, C, C]`` in the dtype of k. Also writes the factors that the scan
applies to accumulators, ``rates [slots, HV, 4, C]``: scale e^G for rows that read, e^H for rows that erase, b, and
gamma. The first two include norms. Grid (slots, H): q k^T is computed once for all value heads of a key head. (With a
decay per channel this kernel does not run: `scan` uses P, Kd and A directly.)

If the same key comes back in every chunk, X is the same in every chunk, and so are its rounding errors. With beta near
2 the state stays as large as it was, and these errors add up. So for such a chunk X, Y and b are c X, c Y and b / c in
bfloat16, with a number c of the chunk's own (`dither`). Then the errors differ. Elsewhere c is 1. It comes after gamma.
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import count_slots, find_chunk, follow, lead, load_tile, pitch, rows_of, sees
from flash_delta.kernels.runtime.arguments import launch_rule, strides
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import Factors, Solved
from flash_delta.kernels.triton.forward.products import dither, times_inverse, unit_of
from flash_delta.kernels.triton.forward.solve import MOST
from flash_delta.kernels.triton.tiles import tile


@triton.jit
def decay(high_i, low_i, high_j, low_j):
    """e^{G_i - G_j} for every pair, [C, C]. The large parts cancel before the small parts are added. Exponents are at
    most MOST, so that pairs above the diagonal, which callers leave out, do not overflow."""
    exponent = (high_i[:, None] - high_j[None, :]) + (low_i[:, None] - low_j[None, :])
    return tl.exp(tl.minimum(exponent, MOST))


@triton.jit
def load_gate(vectors, i, C: tl.constexpr, UNDECAYED: tl.constexpr):
    """G and H of one chunk, each (high, low) [C], and (high, low) of the last G, from the ``vectors`` of `solve`."""
    high, low = tl.load(vectors + i), tl.load(vectors + C + i)
    high_p, low_p = high, low
    if UNDECAYED:
        high_p = tl.load(vectors + i - 1, mask=i > 0, other=0.0)
        low_p = tl.load(vectors + C + i - 1, mask=i > 0, other=0.0)
    return high, low, high_p, low_p, tl.load(vectors + C - 1), tl.load(vectors + 2 * C - 1)


@triton.jit
def reflects(b):
    """Whether a chunk in which each token has the same key keeps more than half of the state, with a beta above 1."""
    kept = tl.log2(tl.maximum(tl.abs(1.0 - b), 1e-30))
    return tl.sum(tl.where(b > 1.0, kept, kept - 1.0 / b.shape[0])) > -1.0


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def factor(
    q, k, cu_seqlens, A, vectors, norms, X, Y, rates, N, T, scale, q_strides, k_strides,
    H, HV, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, UNDECAYED: tl.constexpr, ERASE: tl.constexpr, REFLECTS: tl.constexpr,
    STEPS: tl.constexpr, SHORT: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead(OVERLAP)
    slot, h = tl.program_id(0), tl.program_id(1)
    n, row, token, stop = find_chunk(slot, cu_seqlens, N, T, C, PACKED, SHORT)
    if (token >= stop) | (n >= N):
        follow(OVERLAP and SHORT > 0)
        return
    i, c = tl.arange(0, C), tl.arange(0, BK)
    ty: tl.constexpr = k.dtype.element_ty
    KP: tl.constexpr = pitch(K)
    DITHER: tl.constexpr = ERASE and REFLECTS and ty == tl.bfloat16
    square = i[:, None] * C + i[None, :]
    qq = load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK, False, STEPS)  # [C, BK]
    kk = load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK)  # [C, BK]
    scores = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
    follow(OVERLAP)
    first = slot.to(tl.int64) * HV + h * GROUP
    rq, rk, rp = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if NORM:
        norms += (slot.to(tl.int64) * H + h) * 3 * C
        rq, rk, rp = tl.load(norms + i), tl.load(norms + C + i), tl.load(norms + 2 * C + i)
    scores = tl.where(sees(i, i, STEPS), scores * (scale * rq)[:, None] * rk[None, :], 0.0)  # [C, C]
    keys = kk.to(tl.float32) * rk[:, None]
    if ERASE:
        if not NORM and A.dtype.element_ty == tl.float16:
            unit, inverse = unit_of(tl.max(tl.abs(keys)))
            keys *= inverse
        keys = keys.to(A.dtype.element_ty)
    if DITHER:
        own = dither(rows_of(q, q_strides, row, h) + (token // STEPS).to(tl.int64) * q_strides[1], q_strides[3])
    for member in range(GROUP):
        head = first + member
        v = vectors + head * 4 * C
        b = tl.load(v + 2 * C + i)
        e_q, e_p, e_k, gamma = scale * rq, rp, tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
        y = scores  # P
        if GATE:
            high, low, high_p, low_p, last_high, last_low = load_gate(v, i, C, UNDECAYED)
            e_q *= tl.exp(high + low)
            e_p *= tl.exp(high_p + low_p)
            e_k *= tl.exp((last_high - high) + (last_low - low))
            gamma *= tl.exp(last_high + last_low)
            y = y * decay(high, low, high, low)
        at = rates + head * 4 * C + i
        tl.store(at, e_q)
        tl.store(at + C, e_p)
        by = 1.0
        if DITHER:
            by = tl.where(reflects(b), own, 1.0)
        tl.store(at + 2 * C, b / by)
        tl.store(at + 3 * C, tl.where(i == 1, by, gamma))
        if ERASE:
            a = tl.load(A + head * C * C + square)
            y = times_inverse(y, a, False, PRECISION, by)
        tl.store(Y + head * C * C + square, y.to(ty))
        if ERASE:
            decayed = (a * e_k[:, None]).to(a.dtype)  # decays are applied to A, which has fewer numbers
            x = tl.dot(tl.trans(decayed), keys, input_precision=PRECISION)
            if not NORM and a.dtype == tl.float16:
                x *= unit
            x *= by
        else:
            x = keys * e_k[:, None]
        tl.store(X + (head * C + i[:, None]) * KP + c[None, :], x.to(ty), mask=(c < KP)[None, :])


def run_factor(c: Draft, s: Solved, f: Factors, t: Tile | None = None, *, follows: bool = True) -> None:
    """``follows``: the launch before it belongs to the same call."""
    p, x = c.p, c.x
    launch_rule(
        c, factor, (x.q, x.k, x.cu_seqlens, *s, *f),
        (count_slots(p), p.H, 1), t or tile("factor", p, c.chip),
        p.N, p.T, p.scale, strides(x.q), strides(x.k), follows=follows,
    )  # fmt: skip
