"""The backward main loop in plain Triton, right to left: the mirror of the forward loop.

    dV = X dS + Y^T dO         dS <- gamma dS + Qg^T dO - Kg^T dV

The state's gradient is kept transposed, dS^T [V, K], in float32 accumulators; dS^T and dV^T feed the products from
registers, dO^T from shared memory. Nothing is transposed after a product (see `flash_delta/compiler/lint.py`).
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_delta.compiler import Launch, Stage
from prototypes.forward_loop import Tile, candidates

SMALL = (Tile(32, 4, 2),)
TILES = {
    "sm_80": SMALL,
    "sm_89": SMALL,
    "sm_90a": (Tile(64, 4, 2), Tile(128, 8, 2)),
    "sm_100": (Tile(64, 8, 2),),  # with 4 warps 4 bytes spill
    "sm_120": SMALL,
    "gfx942": (Tile(64, 4, 1),),
    "gfx950": (Tile(64, 4, 2),),
}


@triton.jit(do_not_specialize=["chunks"])
def backward_loop(
    k, x, q, y, do, gamma, dv, ds, ds0, chunks,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """One state's gradient [BV, K] of one head. Grid (N heads, V / BV). k (holds -Kg), x, q [N, T, K]; do, dv
    [N, T, V]; y [N, T, C]; gamma [N, chunks]; ds [N, chunks, V, K] at the end of each chunk, ds0 [N, V, K]
    at the start."""
    n = tl.program_id(0).to(tl.int64)
    rc, rk, rv = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    column = tl.program_id(1) * BV + rv
    S = tl.zeros([BV, K], tl.float32)
    for step in range(chunks):
        c = n * chunks + chunks - 1 - step
        row = c * C + rc
        s = S.to(k.dtype.element_ty)
        tl.store(ds + (c * V + column[:, None]) * K + rk[None, :], s)
        xx = tl.load(x + row[:, None] * K + rk[None, :])
        yy = tl.load(y + row[:, None] * C + rc[None, :])
        dot = tl.load(do + row[None, :] * V + column[:, None])
        d = tl.dot(s, tl.trans(xx), input_precision="ieee")
        d = tl.dot(dot, yy, d, input_precision="ieee").to(k.dtype.element_ty)
        tl.store(dv + row[None, :] * V + column[:, None], d)
        qq = tl.load(q + row[:, None] * K + rk[None, :])
        kk = tl.load(k + row[:, None] * K + rk[None, :])
        S = tl.dot(dot, qq, S * tl.load(gamma + c), input_precision="ieee")
        S = tl.dot(d, kk, S, input_precision="ieee")
    tl.store(ds0 + (n * V + column[:, None]) * K + rk[None, :], S)


def launch(inputs: dict[str, Tensor], tile: Tile) -> dict[str, Tensor]:
    k, do, y, gamma = (inputs[name] for name in ("k", "do", "y", "gamma"))
    (N, _, K), V, C, chunks = k.shape, do.shape[2], y.shape[2], gamma.shape[1]
    dv, ds, ds0 = torch.empty_like(do), k.new_empty(N, chunks, V, K), torch.empty(N, V, K, device=k.device)
    backward_loop[(N, V // tile.BV)](
        k, inputs["x"], inputs["q"], y, do, gamma, dv, ds, ds0, chunks, K=K, V=V, C=C, BV=tile.BV,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return {"dv": dv, "ds": ds, "ds0": ds0}


def make(
    device: torch.device | str, N: int = 264, chunks: int = 32, K: int = 128, V: int = 128, C: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:  # fmt: skip
    """Two heads for each of 132 multiprocessors. X and K are so small that the gradient stays of order one."""

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, device=device) * std).to(dtype)

    T = chunks * C
    return {
        "k": normal(N, T, K, std=0.25 * C**-0.5),
        "x": normal(N, T, K, std=K**-0.5),
        "q": normal(N, T, K, std=C**-0.5),
        "y": normal(N, T, C, std=C**-0.5),
        "do": normal(N, T, V, std=1),
        "gamma": torch.rand(N, chunks, device=device) * 0.5 + 0.25,
    }


def truth(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    k, x, q, y, do = (inputs[name] for name in ("k", "x", "q", "y", "do"))
    (N, T, _), chunks = y.shape, inputs["gamma"].shape[1]
    dS, dv, ds = k.new_zeros(N, k.shape[2], do.shape[2], dtype=torch.float64), [], []
    for c in reversed(range(chunks)):
        kc, xc, qc, yc, doc = (t[:, c * T // chunks : (c + 1) * T // chunks].double() for t in (k, x, q, y, do))
        ds.append(dS.mT)
        dv.append(xc @ dS + yc.mT @ doc)
        dS = inputs["gamma"][:, c, None, None] * dS + qc.mT @ doc + kc.mT @ dv[-1]
    return {"dv": torch.cat(dv[::-1], 1), "ds": torch.stack(ds[::-1], 1), "ds0": dS.mT}


def launches(target: str) -> Iterator[Launch]:
    for tile in TILES[target]:
        yield Launch(f"BV={tile.BV}", partial(launch, make("meta"), tile))


STAGES = {"scan_backward": Stage((128, 128), candidates, make, launch, truth)}
