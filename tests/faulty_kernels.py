"""Launches for the compile gate with one planted fault each, named after it, and one without."""

import os
import warnings
from functools import partial

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.device.gluon_compat import barrier

FLAT = gl.BlockedLayout([1], [32], [4], [0])
LINE = gl.SwizzledSharedLayout(1, 1, 1, order=[0])


@triton.jit
def product(a, b, o, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, precision: tl.constexpr):
    """o [M, N] = sum of the products of a [steps, M, K] and b [steps, K, N]. ``steps`` is specialised: see below."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for i in range(steps):
        x = tl.load(a + i * M * K + m[:, None] * K + k[None, :])
        y = tl.load(b + i * K * N + k[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc, input_precision=precision)
    tl.store(o + m[:, None] * N + n[None, :], acc)


@triton.jit
def transposed_accumulator(x, y, q, o, C: tl.constexpr, K: tl.constexpr):
    """o = 2 s y + s^T q with s = tril(x y^T), all [C, K]; s^T is taken from the accumulator."""
    r, c = tl.arange(0, C), tl.arange(0, K)
    at = r[:, None] * K + c[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    s = tl.where(r[:, None] >= r[None, :], tl.dot(a, tl.trans(b)), 0.0).to(x.dtype.element_ty)
    tl.store(o + at, 2 * tl.dot(s, b) + tl.dot(tl.trans(s), tl.load(q + at)))


@gluon.jit
def turned(o, EARLY: gl.constexpr, LATE: gl.constexpr):
    """o = [127, ..., 0], through shared memory. If the barrier is not invalidated LATE, the compiler gives its memory
    to the tile. That does no harm if it was invalidated EARLY."""
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    if EARLY:
        mbarrier.invalidate(bars.index(0))
    i = gl.arange(0, 128, layout=FLAT)
    tile = gl.allocate_shared_memory(gl.int32, [128], LINE)
    tile.store(127 - i)
    barrier()
    gl.store(o + i, tile.load(FLAT))
    if LATE:
        mbarrier.invalidate(bars.index(0))


def multiply(M, N, K, stages=1, steps=100, precision="ieee", dtype=torch.bfloat16):
    a, b = (torch.empty(steps, *shape, dtype=dtype, device="meta") for shape in ((M, K), (K, N)))
    o = torch.empty(M, N, device="meta")
    product[(1,)](a, b, o, steps, M, N, K, precision, num_warps=4, num_stages=stages, enable_fp_fusion=True)


def transpose_accumulator():
    x, y, q, o = (torch.empty(64, 128, dtype=torch.bfloat16, device="meta") for _ in range(4))
    transposed_accumulator[(1,)](x, y, q, o, C=64, K=128, num_warps=4, enable_fp_fusion=True)


def turn(**when):
    turned[(1,)](torch.empty(128, dtype=torch.int32, device="meta"), **when, num_warps=4, enable_fp_fusion=True)


def launches(target):
    yield Launch("good", partial(multiply, 64, 64, 64))
    if target == "sm_80":
        yield Launch("crash", os.abort)
    if target == "sm_89":
        yield Launch("shared", partial(multiply, 128, 128, 64, stages=5))
    if target == "sm_90a":
        yield Launch("large", partial(multiply, 128, 256, 64))  # 256 of 255 registers for the accumulator
        yield Launch("lint", transpose_accumulator)
        yield Launch("barriers", partial(turn, EARLY=False, LATE=False))
        yield Launch("ended", partial(turn, EARLY=False, LATE=True))
        yield Launch("ended-early", partial(turn, EARLY=True, LATE=False))
    if target == "sm_100":
        yield Launch("tensor", partial(multiply, 256, 256, 32, precision="tf32x3", dtype=torch.float32))
    if target == "gfx942":
        yield Launch("warning", partial(warnings.warn, "this option will go"))
        yield Launch("compile", partial(multiply, 64, 64, 64, precision="tf32x3", dtype=torch.float32))
