"""The end of the gradients of q and k with a decay per channel: the sum over a key head's value heads, and the norm.

    dq = z = sum of dq over value heads;      with a norm y = r q, of r dy:  dq = z - y <y, z>

This is a separate kernel after `channel_gradients`. Programs there have only a few channels each, so row sums over all
channels would have to wait for other programs. Grid (slots, H).
"""

import triton
import triton.language as tl

from flash_delta.kernels.device.chunk import count_slots, enter_chunk, load_block, load_tile, rows_of, store_tile
from flash_delta.kernels.runtime.arguments import launch_rule, strides
from flash_delta.kernels.runtime.plan import Draft
from flash_delta.kernels.runtime.workspace import HeadGradients, Solved
from flash_delta.kernels.triton.backward.gradients import norm_backward
from flash_delta.kernels.triton.tiles import HEADS
from flash_delta.problem import Inputs


@triton.jit
def sum_heads(parts, first, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """``[C, BK]``: the sum over the value heads of a key head. ``first``: the first of them."""
    z = tl.zeros([C, BK], tl.float32)
    for member in range(GROUP):
        z += load_block(parts + (first + member) * C * K, 0, 0, C, K, C, BK).to(tl.float32)
    return z


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def key_head_gradients(
    q, k, norms, cu_seqlens, dq_parts, dk_parts, dq, dk, N, T, q_strides, k_strides, H, HV, GROUP: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    slot, h, row, token, stop, empty = enter_chunk(cu_seqlens, N, T, C, PACKED, OVERLAP)
    i = tl.arange(0, C)
    ty: tl.constexpr = k.dtype.element_ty
    strides = (T.to(tl.int64) * H * K, H * K, K, 1)
    dq, dk = rows_of(dq, strides, row, h), rows_of(dk, strides, row, h)
    if empty:
        store_tile(dq, strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
        store_tile(dk, strides, tl.zeros([C, BK], ty), token, stop, 0, K, C, BK)
        return
    first = slot.to(tl.int64) * HV + h * GROUP
    z = sum_heads(dq_parts, first, GROUP, K, BK, C)
    if NORM:
        norm = norms + (slot.to(tl.int64) * H + h) * 3 * C + i
        qq = load_tile(rows_of(q, q_strides, row, h), q_strides, token, stop, 0, K, C, BK)
        z = norm_backward(z, qq, tl.load(norm))
    store_tile(dq, strides, z.to(ty), token, stop, 0, K, C, BK)
    z = sum_heads(dk_parts, first, GROUP, K, BK, C)
    if NORM:
        kk = load_tile(rows_of(k, k_strides, row, h), k_strides, token, stop, 0, K, C, BK)
        z = norm_backward(z, kk, tl.load(norm + C))
    store_tile(dk, strides, z.to(ty), token, stop, 0, K, C, BK)


def run_key_head_gradients(c: Draft, s: Solved, heads: HeadGradients, d: Inputs) -> None:
    p, x = c.p, c.x
    pointers = (x.q, x.k, s.norms, x.cu_seqlens, heads.dq, heads.dk, d.q, d.k)
    scalars = p.N, p.T, strides(x.q), strides(x.k)
    launch_rule(c, key_head_gradients, pointers, (count_slots(p), p.H, 1), HEADS, *scalars, follows=True)
