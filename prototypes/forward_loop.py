"""The forward main loop in plain Triton: the state walks from chunk to chunk.

    R = V - Kg S         O = Qg S + Y R         S <- gamma S + X^T R

Kg and Qg arrive decayed, X = A^T Kd and Y = P A from the stages before. The state is kept transposed, S^T [V, K], in
float32 accumulators that feed the next product from registers.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_delta.compiler import Launch, Stage


class Tile(NamedTuple):
    BV: int  # columns of the state that one program walks with
    warps: int
    stages: int  # chunks in flight


SMALL = (Tile(32, 4, 2),)  # more columns spill: 255 registers per thread do not hold S, R and O
TILES = {
    "sm_80": SMALL,
    "sm_89": SMALL,
    "sm_90a": (Tile(64, 4, 2), Tile(128, 8, 2)),
    "sm_100": (Tile(64, 4, 2),),
    "sm_120": SMALL,
    "gfx942": (Tile(64, 4, 1),),  # a second stage needs more than its 64 KB of LDS
    "gfx950": (Tile(64, 4, 2),),
}


@triton.jit(do_not_specialize=["chunks"])
def forward_loop(
    k, x, v, q, y, gamma, o, state, chunks,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """One state [BV, K] of one head. Grid (N heads, V / BV). k, x, q [N, T, K]; v, o [N, T, V]; y [N, T, C];
    gamma [N, chunks], the decay over a chunk; state [N, V, K], written at the end."""
    n = tl.program_id(0).to(tl.int64)
    rc, rk, rv = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    column = tl.program_id(1) * BV + rv
    S = tl.zeros([BV, K], tl.float32)
    for c in range(chunks):
        row = (n * chunks + c) * C + rc
        kk = tl.load(k + row[:, None] * K + rk[None, :])
        xx = tl.load(x + row[:, None] * K + rk[None, :])
        qq = tl.load(q + row[:, None] * K + rk[None, :])
        yy = tl.load(y + row[:, None] * C + rc[None, :])
        vt = tl.load(v + row[None, :] * V + column[:, None])
        s = S.to(k.dtype.element_ty)
        r = (vt.to(tl.float32) - tl.dot(s, tl.trans(kk), input_precision="ieee")).to(k.dtype.element_ty)
        out = tl.dot(s, tl.trans(qq), input_precision="ieee")
        S = tl.dot(r, xx, S * tl.load(gamma + n * chunks + c), input_precision="ieee")
        out = tl.dot(r, tl.trans(yy), out, input_precision="ieee")
        tl.store(o + row[None, :] * V + column[:, None], out.to(k.dtype.element_ty))
    tl.store(state + (n * V + column[:, None]) * K + rk[None, :], S)


def launch(inputs: dict[str, Tensor], tile: Tile) -> dict[str, Tensor]:
    k, v, y, gamma = (inputs[name] for name in ("k", "v", "y", "gamma"))
    (N, _, K), V, C = k.shape, v.shape[2], y.shape[2]
    o, state = torch.empty_like(v), torch.empty(N, V, K, device=v.device)
    forward_loop[(N, V // tile.BV)](
        k, inputs["x"], v, inputs["q"], y, gamma, o, state, gamma.shape[1], K=K, V=V, C=C, BV=tile.BV,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return {"o": o, "state": state}


def make(
    device: torch.device | str, N: int = 264, chunks: int = 32, K: int = 128, V: int = 128, C: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:  # fmt: skip
    """Two heads for each of 132 multiprocessors. X and K are so small that the state stays of order one."""

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, device=device) * std).to(dtype)

    T = chunks * C
    return {
        "k": normal(N, T, K, std=K**-0.5),
        "x": normal(N, T, K, std=0.25 * C**-0.5),
        "q": normal(N, T, K, std=K**-0.5),
        "y": normal(N, T, C, std=C**-0.5),
        "v": normal(N, T, V, std=1),
        "gamma": torch.rand(N, chunks, device=device) * 0.5 + 0.25,
    }


def truth(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    k, x, q, y, v = (inputs[name] for name in ("k", "x", "q", "y", "v"))
    (N, T, _), chunks = y.shape, inputs["gamma"].shape[1]
    S, o = k.new_zeros(N, k.shape[2], v.shape[2], dtype=torch.float64), []
    for c in range(chunks):
        kc, xc, qc, yc, vc = (t[:, c * T // chunks : (c + 1) * T // chunks].double() for t in (k, x, q, y, v))
        R = vc - kc @ S
        o.append(qc @ S + yc @ R)
        S = inputs["gamma"][:, c, None, None] * S + xc.mT @ R
    return {"o": torch.cat(o, 1), "state": S.mT}


def candidates(target: str) -> list[Tile]:
    one_stage = target == "gfx942"
    return [Tile(*numbers) for numbers in product((32, 64, 128), (4, 8), (1,) if one_stage else (1, 2, 3))]


def launches(target: str) -> Iterator[Launch]:
    for tile in TILES[target]:
        yield Launch(f"BV={tile.BV}", partial(launch, make("meta"), tile))


STAGES = {"scan": Stage((128, 128), candidates, make, launch, truth)}
