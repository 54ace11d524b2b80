"""What the tuner times: launchers of stages with several possible tiles, and the true outputs of each stage."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime.chip import Chip, Tile, takes_tma
from flash_delta.kernels.runtime.run import run
from flash_delta.kernels.runtime.workspace import Factors, Solved
from flash_delta.kernels.triton.serving.rows import plan_decode
from flash_delta.problem import Around, Inputs, Pools, Problem, Slots
from flash_delta.reference import backend, chunked, stages
from flash_delta.reference.tokens import TokenReader
from workshop.gate.cases.members import describe
from workshop.gate.cases.rule import Kernels, Tensors
from workshop.tune.stage import Stage


def make(
    device: torch.device | str, B: int = 4, T: int = 2048, H: int = 64, HV: int = 64, K: int = 128, V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:  # fmt: skip
    """A call of Gated DeltaNet, and the outputs of `solve` and `factor`. 256 states scan through 32 chunks."""
    new = partial(torch.randn, B, T, device=device)
    q, k = (F.normalize(new(H, K), dim=-1).to(dtype) for _ in range(2))
    x = Inputs(q, k, new(HV, V).to(dtype), F.logsigmoid(new(HV) + 3), torch.sigmoid(new(HV)))
    kernels = Kernels(describe(x), x)
    kernels.solve()
    kernels.factor()
    made = kernels.launch(kernels.solved, kernels.factors)
    return made | {name: t for name, t in x._asdict().items() if t is not None}


class Made(NamedTuple):
    """The outputs of `solve` and `factor`."""

    A: Tensor
    vectors: Tensor
    X: Tensor
    Y: Tensor
    rates: Tensor


def kernels_on(made: Tensors, factored: bool = True) -> Kernels:
    """Kernels that read what was made and write elsewhere."""
    x = Inputs(*(made[name] for name in ("q", "k", "v", "g", "beta")))
    kernels = Kernels(describe(x), x, Made(*(made[name] for name in Made._fields)))
    (given,) = kernels.more
    kernels.solved = Solved(given.A, given.vectors, None)
    if factored:
        kernels.factors = Factors(given.X, given.Y, given.rates)
    return kernels


def tune_factor(made: Tensors, t: Tile) -> Tensors:
    kernels = kernels_on(made, factored=False)
    kernels.factor(t)
    return kernels.launch(kernels.factors)


def tune_scan(made: Tensors, t: Tile) -> Tensors:
    kernels = kernels_on(made)
    return kernels.launch(kernels.scan(False, t))


def tune_scan_backward(made: Tensors, t: Tile) -> Tensors:
    kernels = kernels_on(made)
    kernels.scan_backward(True, t)
    return kernels.launch(kernels.chain, kernels.residual)


def truth(made: Tensors) -> Tensors:
    """The true outputs of all three stages, in float64. The reference computes all chunks as one segment, and `by_slot`
    brings its results into the order in which kernels write theirs."""
    x = Inputs(*(made[name].double() for name in ("q", "k", "v", "g", "beta")))
    p = describe(x)
    layout = chunked.make_layout(p)
    reader = TokenReader(p, layout, x)
    (segment,) = layout.segments(count_slots(p))
    tokens = reader.read(segment)
    factors = stages.factor(tokens)
    dS = x.v.new_zeros(p.N, p.H, p.HV // p.H, p.K, p.V)
    dS1, dU = stages.scan_backward(tokens, factors, segment, reader.values(x.v, segment) * p.scale, dS)

    def by_slot(t: Tensor) -> Tensor:
        return t.flatten(1, 2).unflatten(0, (-1, p.N)).transpose(0, 1).flatten(0, 1)

    out = chunked.forward(p, x)
    return {
        "X": by_slot(factors.X), "Y": p.scale * by_slot(factors.Y), "o": out.o, "final_state": out.final_state,
        "dstates": by_slot(dS1.mT), "dU": by_slot(dU),
    }  # fmt: skip


def truth_of(*names: str) -> Callable[[Tensors], Tensors]:
    def chosen(made: Tensors) -> Tensors:
        all_of_them = truth(made)
        return {name: all_of_them[name] for name in names}

    return chosen


def factor_candidates(target: str) -> list[Tile]:
    limits = (None,) if target.startswith("gfx") else (None, 128, 168, 184, 200)
    return [Tile(warps, 1, registers=limit) for warps in (4, 8) for limit in limits]


def scan_candidates(target: str) -> list[Tile]:
    tma = takes_tma(Chip(target.removesuffix("a"), 1))
    depths = (1,) if target == "gfx942" else (1, 2, 3, 4)
    return [Tile(warps, depth, BV, tma=tma) for BV, warps, depth in product((32, 64, 128), (4, 8), depths)]


def make_decoding(
    device: torch.device | str, B: int = 128, T: int = 1, H: int = 16, HV: int = 32, K: int = 128, V: int = 128,
    dtype: torch.dtype = torch.bfloat16, *, pool: torch.dtype, v_first: bool,
) -> Tensors:  # fmt: skip
    """Makes a decoding call as `make` does. States are read from the first half of a pool and written to the second."""
    states = torch.randn(2 * B, HV, *((V, K) if v_first else (K, V)), device=device).to(pool)
    slots = torch.arange(2 * B, dtype=torch.int32, device=device)
    made = make(device, B, T, H, HV, K, V, dtype)
    return made | {"pool": states, "read": slots[:B], "write": slots[B:]}


def decoding(made: Tensors, v_first: bool) -> tuple[Problem, Inputs, Slots]:
    x = Inputs(*(made[name] for name in ("q", "k", "v", "g", "beta")))
    p = describe(x)._replace(recurrent=True, state_v_first=v_first, pools=Pools(dtype=made["pool"].dtype))
    return p, x, Slots(made["pool"], made["read"], made["write"])


def tune_decode(made: Tensors, t: Tile, v_first: bool) -> Tensors:
    p, x, s = decoding(made, v_first)
    (o,) = run(partial(plan_decode, choice=t), p, x, s, Around())
    return {"o": o, "pool": s.state_pool}


def truth_of_decode(made: Tensors, v_first: bool) -> Tensors:
    wide = {name: t.double() if t.is_floating_point() else t for name, t in made.items()}
    p, x, s = decoding(wide, v_first)
    return {"o": backend.decode(p, x, s, Around()), "pool": s.state_pool}


def decode_candidates(target: str) -> list[Tile]:
    """Tiles with 2 to 32 rows per warp."""
    limits = (None,) if target.startswith("gfx") else (None, 96, 128)
    sizes = [(BV, warps) for BV, warps in product((4, 8, 16, 32, 64), (1, 2, 4, 8)) if 2 * warps <= BV <= 32 * warps]
    return [Tile(warps, 1, BV, registers=limit) for (BV, warps), limit in product(sizes, limits)]


def stage_of_decode(pool: torch.dtype, v_first: bool) -> Stage:
    return Stage(
        (128, 128), decode_candidates, partial(make_decoding, pool=pool, v_first=v_first),
        partial(tune_decode, v_first=v_first), partial(truth_of_decode, v_first=v_first),
    )  # fmt: skip


STAGES = {
    "factor": Stage((128, 128), factor_candidates, make, tune_factor, truth_of("X", "Y")),
    "scan": Stage((128, 128), scan_candidates, make, tune_scan, truth_of("o", "final_state")),
    "scan_backward": Stage((128, 128), scan_candidates, make, tune_scan_backward, truth_of("dstates", "dU")),
    "decode": stage_of_decode(torch.float32, True),
    "decode-bfloat16": stage_of_decode(torch.bfloat16, True),
    "decode-k-first": stage_of_decode(torch.float32, False),
    "decode-k-first-bfloat16": stage_of_decode(torch.bfloat16, False),
}
