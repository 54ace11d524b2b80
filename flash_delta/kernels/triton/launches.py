"""What the compile gate compiles and the tuner times: the launchers, on problems that models have."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from flash_delta.compiler import Launch, Stage
from flash_delta.kernels.triton import backend, launch
from flash_delta.kernels.triton.chunk import C
from flash_delta.kernels.triton.tiles import Tile
from flash_delta.problem import Inputs, Problem
from flash_delta.reference import chunked, stages
from flash_delta.reference.tokens import TokenReader

Tensors = dict[str, Tensor]
bf16 = torch.bfloat16


def _problem(x: Inputs, **options) -> Problem:
    (B, T, H, K), (_, _, HV, V) = x.q.shape, x.v.shape
    described = {"gate": "scalar", "erase": "decayed", "lengths": (T,) * B, "scale": K**-0.5} | options
    N = B if x.cu_seqlens is None else x.cu_seqlens.numel() - 1
    packed = x.cu_seqlens is not None
    return Problem("tune", B, T, H, HV, K, V, N, x.q.dtype, x.q.device, packed=packed, **described)


def _compile(
    D: int, backward: bool, dtype: torch.dtype = bf16, gate: str = "scalar", erase: str | None = "decayed", raw: bool = False
) -> None:
    """Forward, or forward and backward with everything kept, of two packed sequences."""
    H, HV, T = 2, 4, 128
    new = partial(torch.empty, device="meta")
    q, v = new(1, T, H, D, dtype=dtype), new(1, T, HV, D, dtype=dtype)
    g = None if gate == "none" else new(1, T, HV)
    own = q if erase == "undecayed" else None
    A_log = new(HV) if raw else None
    x = Inputs(q, q, v, g, new(1, T, HV), own, new(2, HV, D, D), A_log, A_log, new(3, dtype=torch.int32))
    flags = {"l2norm": raw, "raw_gate": raw, "raw_beta": raw, "lengths": None, "needs_grad": backward}
    p = _problem(x, gate=gate, erase=erase, **flags)
    saved = backend.forward(p, x).saved
    if backward:
        backend.backward(p, x, saved, v, new(2, HV, D, D))


def launches(target: str) -> Iterator[Launch]:
    for D in (64, 128, 256):
        yield Launch(f"gdn-{D}", partial(_compile, D, False))
    for D in (64, 128):
        yield Launch(f"gdn-{D}-training", partial(_compile, D, True))
    yield Launch("gdn-128-raw-training", partial(_compile, 128, True, raw=True))
    yield Launch("comba-128-training", partial(_compile, 128, True, erase="undecayed"))
    yield Launch("simple-gla-128-training", partial(_compile, 128, True, erase=None))
    yield Launch("delta-rule-128-training", partial(_compile, 128, True, gate="none"))
    yield Launch("gdn-64-float32-training", partial(_compile, 64, True, dtype=torch.float32))
