"""The inverse T = (I + diag(b) tril(k k^T, -1))^-1 of a chunk of 64 tokens, one chunk of one head per program.

Triton (any GPU): the four diagonal blocks by substitution, row by row, then the blocks below them by products.
Gluon (Hopper): the same blocks by columns with rows in registers, then the merge T = (I - E)(I + E^2) D with D the
inverted diagonal blocks and E = D N_off, N_off the blocks below: four chained wgmma 64 wide.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from flash_delta.compiler import Launch, Stage
from prototypes.gluon_names import barrier, reinterpret


class Tile(NamedTuple):
    warps: int
    precision: str  # of the products that merge blocks: "tf32", "tf32x3", "ieee"


@triton.jit
def invert16(A, o):
    """(I + A)^-1 for a strictly lower A [16, 16], row by row."""
    X = -A
    for i in tl.static_range(2, 16):
        a = tl.sum(tl.where((o == i)[:, None], -A, 0.0), 0)
        a = tl.where(o < i, a, 0.0)
        a += tl.sum(a[:, None] * X, 0)
        X = tl.where((o == i)[:, None], a[None, :], X)
    return X + tl.where(o[:, None] == o[None, :], 1.0, 0.0)


@triton.jit
def mul(a, b, precision: tl.constexpr):
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def triton_inverse(k, b, t, K: tl.constexpr, PREC: tl.constexpr):
    """Grid (chunks). k [chunks, 64, K], b [chunks, 64]; writes t [chunks, 64, 64] in the type of k."""
    o, rk = tl.arange(0, 16), tl.arange(0, K)
    first = tl.program_id(0).to(tl.int64) * 64
    at = o[:, None] * K + rk[None, :]
    k0, k1 = tl.load(k + first * K + at), tl.load(k + (first + 16) * K + at)
    k2, k3 = tl.load(k + (first + 32) * K + at), tl.load(k + (first + 48) * K + at)
    b0, b1 = tl.load(b + first + o)[:, None], tl.load(b + first + 16 + o)[:, None]
    b2, b3 = tl.load(b + first + 32 + o)[:, None], tl.load(b + first + 48 + o)[:, None]
    low = o[:, None] > o[None, :]
    t0, t1, t2, t3 = tl.trans(k0), tl.trans(k1), tl.trans(k2), tl.trans(k3)
    I00 = invert16(tl.where(low, mul(k0, t0, PREC) * b0, 0.0), o)
    I11 = invert16(tl.where(low, mul(k1, t1, PREC) * b1, 0.0), o)
    I22 = invert16(tl.where(low, mul(k2, t2, PREC) * b2, 0.0), o)
    I33 = invert16(tl.where(low, mul(k3, t3, PREC) * b3, 0.0), o)
    A10, A20, A21 = mul(k1, t0, PREC) * b1, mul(k2, t0, PREC) * b2, mul(k2, t1, PREC) * b2
    A30, A31, A32 = mul(k3, t0, PREC) * b3, mul(k3, t1, PREC) * b3, mul(k3, t2, PREC) * b3
    I10 = -mul(mul(I11, A10, PREC), I00, PREC)
    I21 = -mul(mul(I22, A21, PREC), I11, PREC)
    I32 = -mul(mul(I33, A32, PREC), I22, PREC)
    I20 = -mul(I22, mul(A20, I00, PREC) + mul(A21, I10, PREC), PREC)
    I31 = -mul(I33, mul(A31, I11, PREC) + mul(A32, I21, PREC), PREC)
    I30 = -mul(I33, mul(A30, I00, PREC) + mul(A31, I10, PREC) + mul(A32, I20, PREC), PREC)
    p = t + (first + o)[:, None] * 64 + o[None, :]
    ty: tl.constexpr = t.dtype.element_ty
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1, 4):
            tl.store(p + i * 16 * 64 + j * 16, tl.zeros([16, 16], ty))
    tl.store(p, I00.to(ty))
    tl.store(p + 16 * 64, I10.to(ty))
    tl.store(p + 16 * 64 + 16, I11.to(ty))
    tl.store(p + 32 * 64, I20.to(ty))
    tl.store(p + 32 * 64 + 16, I21.to(ty))
    tl.store(p + 32 * 64 + 32, I22.to(ty))
    tl.store(p + 48 * 64, I30.to(ty))
    tl.store(p + 48 * 64 + 16, I31.to(ty))
    tl.store(p + 48 * 64 + 32, I32.to(ty))
    tl.store(p + 48 * 64 + 48, I33.to(ty))


@gluon.jit
def gluon_inverse(k_ptr, b_ptr, a_ptr, K: gl.constexpr, DT: gl.constexpr):
    """Grid (chunks), 4 warps. k [chunks, 64, K], b [chunks, 64]; writes A = T diag(b) [chunks, 64, 64] in bf16.
    DT: the type of the operands that merge blocks."""
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    # [4 blocks, 16 rows (in registers), 16 columns]; the upper two warps hold copies
    rows3: gl.constexpr = gl.BlockedLayout([1, 16, 1], [2, 1, 16], [2, 1, 2], [1, 2, 0])
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    c = gl.program_id(0)
    sk = gl.allocate_shared_memory(gl.bfloat16, [64, K], tile)
    sd = gl.allocate_shared_memory(gl.float32, [16, 64], plain2)
    sD = gl.allocate_shared_memory(DT, [64, 64], tile)
    sG = gl.allocate_shared_memory(DT, [64, 64], tile)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, blocked))
    cc = gl.arange(0, K, layout=gl.SliceLayout(0, blocked))
    sk.store(gl.load(k_ptr + (c * 64 + r[:, None]) * K + cc[None, :]))
    fence_async_shared()
    barrier()
    n = warpgroup_mma(sk, sk.permute([1, 0]), gl.zeros([64, 64], gl.float32, acc), use_acc=False)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, acc))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, acc))
    n = gl.where(i[:, None] > j[None, :], n * gl.load(b_ptr + c * 64 + i)[:, None], 0.0)
    # the diagonal blocks go to shared memory as [column m][block][row i]
    n4 = n.reshape([4, 16, 4, 16])
    lay4: gl.constexpr = n4.type.layout
    block_row = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, lay4))))
    block_col = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, lay4))))
    diagonal = block_row[:, None, None, None] == block_col[None, None, :, None]
    blocks = gl.sum(gl.where(diagonal, n4, 0.0), 2)
    sd.store(blocks.permute([2, 0, 1]).reshape([16, 64]))
    barrier()
    i3 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, rows3)))
    c3 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, rows3)))
    X = gl.where(i3[None, :, None] == c3[None, None, :], 1.0, 0.0) + gl.zeros([4, 16, 16], gl.float32, rows3)
    sd3 = reinterpret(sd, gl.float32, [16, 4, 16], plain2)
    for m in gl.static_range(15):
        row_m = gl.sum(gl.where(i3[None, :, None] == m, X, 0.0), 1)  # in a thread: folds into a register move
        col_m = sd3.index(m).load(gl.SliceLayout(2, rows3))  # one broadcast load of 16 bytes per four rows
        X = X - col_m[:, :, None] * row_m[:, None, :]
    sD.store(gl.zeros([64, 64], DT, acc))
    barrier()
    X4 = gl.where(diagonal, gl.convert_layout(X, gl.SliceLayout(2, lay4)).expand_dims(2), 0.0)
    D = gl.convert_layout(X4.reshape([64, 64]), acc)
    sD.store(D.to(DT))
    off = gl.where((i[:, None] // 16) != (j[None, :] // 16), n, 0.0)
    sG.store(off.to(DT))
    fence_async_shared()
    barrier()
    zero = gl.zeros([64, 64], gl.float32, acc)
    E = warpgroup_mma(gl.convert_layout(D.to(DT), operand), sG, zero, use_acc=False)
    e_op = gl.convert_layout(E.to(DT), operand)
    ED = warpgroup_mma(e_op, sD, zero, use_acc=False)
    barrier()
    sG.store(ED.to(DT))
    fence_async_shared()
    barrier()
    F = D + warpgroup_mma(e_op, sG, zero, use_acc=False)  # (I + E^2) D
    barrier()
    sG.store(F.to(DT))
    fence_async_shared()
    barrier()
    T = F - warpgroup_mma(e_op, sG, zero, use_acc=False)
    scaled = (T * gl.load(b_ptr + c * 64 + j)[None, :]).to(gl.bfloat16)
    gl.store(a_ptr + c * 4096 + i[:, None] * 64 + j[None, :], scaled)


def launch(inputs: dict[str, Tensor], tile: Tile) -> dict[str, Tensor]:
    k, b = inputs["k"], inputs["b"]
    chunks, C, K = k.shape
    t = k.new_empty(chunks, C, C)
    triton_inverse[(chunks,)](
        k, b, t, K=K, PREC=tile.precision, num_warps=tile.warps, num_stages=1, enable_fp_fusion=True
    )
    return {"t": t}


def launch_gluon(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    k, b = inputs["k"], inputs["b"]
    chunks, C, K = k.shape
    a = k.new_empty(chunks, C, C)
    gluon_inverse[(chunks,)](k, b, a, K=K, DT=gl.float16, num_warps=4, enable_fp_fusion=True)
    return {"a": a}


def make(
    device: torch.device | str, chunks: int = 132 * 64, K: int = 128, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Keys that have half of their length in common, so that the inverse is far from the identity."""
    keys = torch.randn(chunks, 64, K, device=device) + torch.randn(chunks, 1, K, device=device)
    return {
        "k": torch.nn.functional.normalize(keys, dim=-1).to(dtype),
        "b": torch.rand(chunks, 64, device=device) * 0.5 + 0.5,
    }


def truth(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    k, b = inputs["k"].double(), inputs["b"].double()
    N = torch.tril(b[:, :, None] * (k @ k.mT), -1)
    eye = torch.eye(k.shape[1], dtype=torch.float64, device=k.device)
    return {"t": torch.linalg.solve_triangular(eye + N, eye.expand_as(N), upper=False, unitriangular=True)}


def candidates(target: str) -> list[Tile]:
    precisions = ("ieee",) if target.startswith("gfx") else ("tf32", "tf32x3", "ieee")  # AMD has no tf32x3
    return [Tile(warps, precision) for warps in (1, 2, 4) for precision in precisions]


def launches(target: str) -> Iterator[Launch]:
    inputs = make("meta")
    precision = "ieee" if target.startswith("gfx") else "tf32"
    yield Launch(f"warps=1,{precision}", partial(launch, inputs, Tile(1, precision)))
    if target == "sm_90a":
        yield Launch("fp16", partial(launch_gluon, inputs))


STAGES = {"solve": Stage((64, 128), candidates, make, launch, truth)}
