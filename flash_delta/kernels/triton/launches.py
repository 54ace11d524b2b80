"""What the compile gate compiles and the tuner times: the launchers, on problems that models have."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_delta.compiler import Launch, Stage
from flash_delta.kernels.triton import launch, launch_segments
from flash_delta.kernels.triton.chunk import count_slots
from flash_delta.kernels.triton.launcher import make_call
from flash_delta.kernels.triton.tiles import (
    Chip,
    Segments,
    Tile,
    maps_tile,
    scan_tiles,
    segment_tiles,
    takes_tma,
    tile,
)
from flash_delta.kernels.triton.workspace import (
    Chain,
    Channels,
    Factors,
    HeadGradients,
    Residual,
    Scores,
    Solved,
    Workspace,
)
from flash_delta.problem import Inputs, Problem
from flash_delta.reference import chunked, stages
from flash_delta.reference.tokens import TokenReader

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A member of the family, as the gate compiles it: two packed sequences, two value heads per key head."""

    width: int = 128  # K and V
    dtype: torch.dtype = torch.bfloat16
    gate: str = "scalar"
    erase: str | None = "decayed"
    raw: bool = False  # with norms and activations
    lower_bound: float | None = None
    tokens: int = 128
    gap: int = 0  # elements between heads: odd ones keep the copy engine away


# What a kernel's code depends on, each combination once: scans know nothing of gates, norms and activations.
CHUNKS = {
    "gdn-64": Case(64),
    "gdn-128": Case(),
    "gdn-128-raw": Case(raw=True),
    "gdn-256": Case(256),
    "gdn-64-float32": Case(64, torch.float32),
    "comba-128-raw": Case(erase="undecayed", raw=True),
    "delta-rule-128": Case(gate="none"),
    "simple-gla-128": Case(erase=None),
    "kda-64": Case(64, gate="channel"),
    "kda-128": Case(gate="channel"),
    "kda-128-raw": Case(gate="channel", raw=True),
    "kda-128-bounded": Case(gate="channel", raw=True, lower_bound=-5.0),
}
SCANS = {name: CHUNKS[name] for name in ("gdn-64", "gdn-128", "gdn-256", "gdn-64-float32", "simple-gla-128", "kda-128")}
SPLIT = ("gdn-64", "gdn-128", "simple-gla-128", "kda-128")  # of these, sequences in segments


def describe(
    x: Inputs, gate: str = "scalar", erase: str | None = "decayed", raw: bool = False, lower_bound: float | None = None
) -> Problem:
    (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    packed = x.cu_seqlens is not None
    N = x.cu_seqlens.numel() - 1 if packed else B
    return Problem(
        "launches", B, T, H, HV, K, V, N, x.q.dtype, x.q.device, gate, erase, K**-0.5,
        lengths=None if packed else (T,) * B, packed=packed, l2norm=raw, raw_gate=raw,
        lower_bound=lower_bound, raw_beta=raw,
    )  # fmt: skip


class Kernels:
    """The launchers on one problem, with all that the kernels write for each other."""

    def __init__(self, p: Problem, x: Inputs, *more: Tensor | None):
        self.p, self.x, self.c = p, x, make_call(p, x, ("launches",), *more)._replace(direct=False)
        groups = (Channels, Solved, Factors, Residual, Chain, Scores, HeadGradients)
        parts = self.c.parts(Workspace(p, *groups))
        self.channels, self.solved, self.factors, self.residual, self.chain, self.scores, self.heads = parts

    def channel(self) -> None:
        launch.run_channel(self.c, self.solved, self.channels)

    def solve(self) -> None:
        launch.run_solve(self.c, self.channels, self.solved)

    def factor(self, t: Tile | None = None) -> None:
        launch.run_factor(self.c, self.solved, self.factors, t)

    def chunks(self) -> None:
        """All that the scans need."""
        if self.p.gate == "channel":
            self.channel()
        self.solve()
        if self.p.gate != "channel":
            self.factor()

    def scan(self, save: bool, t: Tile) -> Tensors:
        o, final = torch.empty_like(self.x.v), torch.empty(self.p.state_shape, device=self.p.device)
        residual = self.residual if save else None
        launch.run_scan(self.c, self.channels, self.solved, self.factors, o, final, residual, t)
        return {"o": o, "final_state": final}

    def maps(self, split: Segments) -> Tensors:
        """Of segments, and the states that they start from."""
        walk = launch_segments.new_walk(self.p, split)
        launch_segments.run_maps(self.c, self.channels, self.solved, self.factors, walk)
        launch_segments.run_compose(self.c, walk)
        return {"maps": walk.maps, "starts": walk.starts}

    def segments(self, split: Segments) -> Tensors:
        o, final = torch.empty_like(self.x.v), torch.empty(self.p.state_shape, device=self.p.device)
        walk = launch_segments.new_walk(self.p, split)
        launch_segments.run_segments(self.c, self.channels, self.solved, self.factors, o, final, walk)
        return {"o": o, "final_state": final}

    def scan_backward(self, recompute: bool, t: Tile) -> Tensors:
        state, do = self.x.initial_state, self.x.v
        dinitial = None if state is None else torch.empty_like(state)
        launch.run_scan_backward(
            self.c, self.channels, self.solved, self.factors, self.residual, do, state, self.chain, dinitial, t,
            recompute=recompute,
        )  # fmt: skip
        return self.chain._asdict() | (self.residual._asdict() if recompute else {})

    def gradients(self) -> None:
        c, p, x, s, f, do, d = self.c, self.p, self.x, self.solved, self.factors, self.x.v, launch.new_gradients(self.x)
        launch.run_pairs(c, self.channels, s, self.residual, self.chain, do, d, self.scores, self.heads)
        sums = torch.empty(count_slots(p), p.HV, p.K, device=p.device)
        sums = [None if t is None else sums for t in (x.A_log, x.dt_bias)]
        if p.gate == "channel":
            launch.run_channel_gradients(c, self.scores, self.heads, d.g, *sums)
            if launch.needs_halving(p):
                launch.run_halved_gradients(c, s, self.residual, self.chain, do, self.scores, self.heads, d.g, *sums)
            launch.run_key_head_gradients(c, s, self.heads, d)
            return
        launch.run_query_gradients(c, s, f, self.residual, do, d.q, self.scores)
        launch.run_key_gradients(c, s, f, self.residual, self.chain, d, self.scores)
        if p.gate == "scalar" and p.K == 128:  # `gates` knows no width
            launch.run_gates(c, s, self.scores, d.g, *sums)


def problem_of(case: Case) -> tuple[Problem, Inputs]:
    new = partial(torch.empty, device="meta")
    H, HV, T, D = 2, 4, case.tokens, case.width
    q, v = (new(1, T, heads, D + case.gap, dtype=case.dtype)[..., :D] for heads in (H, HV))
    g = {"none": None, "scalar": new(1, T, HV), "channel": new(1, T, HV, D, dtype=case.dtype)}[case.gate]
    beta = None if case.erase is None else new(1, T, HV)
    A_log = new(HV) if case.raw else None
    dt_bias = new(HV * D) if case.raw and case.gate == "channel" else A_log
    own = q if case.erase == "undecayed" else None
    x = Inputs(q, q, v, g, beta, own, new(2, HV, D, D), A_log, dt_bias, new(3, dtype=torch.int32))
    return describe(x, case.gate, case.erase, case.raw, case.lower_bound), x


def call_chunks(case: Case) -> None:
    kernels = Kernels(*problem_of(case))
    kernels.chunks()
    kernels.gradients()


def call_scan(case: Case, save: bool, t: Tile) -> None:
    Kernels(*problem_of(case)).scan(save, t)


def call_maps(case: Case, split: Segments) -> None:
    Kernels(*problem_of(case)).maps(split)


def call_segments(case: Case, split: Segments) -> None:
    Kernels(*problem_of(case)).segments(split)


def call_scan_backward(case: Case, recompute: bool, t: Tile) -> None:
    Kernels(*problem_of(case)).scan_backward(recompute, t)


def launches(target: str) -> Iterator[Launch]:
    """What a call keeps (``disable_recompute``), and what it then does not compute again, at one width."""
    chip = Chip(target.removesuffix("a"), 1)
    for name, case in CHUNKS.items():
        yield Launch(name, partial(call_chunks, case))
    unaligned = {"gdn-128-unaligned": Case(gap=1)} if takes_tma(chip) else {}
    for name, case in (SCANS | unaligned).items():
        p, _ = problem_of(case)
        forms = {
            "": ("scan", partial(call_scan, case, False)),
            "-recomputed": ("scan_both", partial(call_scan_backward, case, True)),
            "-saved": ("scan_kept", partial(call_scan, case, True)),
            "-backward": ("scan_backward", partial(call_scan_backward, case, False)),
        }
        for form in forms if name == "gdn-128" else ("", "-recomputed"):
            kernel, call = forms[form]
            for t in scan_tiles(kernel, p, chip, every=True):
                yield Launch(f"{name}-BV={t.BV}{form}", partial(call, t))
        if name in SPLIT:
            splits = [Segments(128, maps_tile(p, chip), tile("compose", p, chip), t) for t in segment_tiles(p, chip)]
            yield Launch(f"{name}-maps", partial(call_maps, case, splits[0]))
            for split in splits:
                yield Launch(f"{name}-BV={split.scan.BV}-segments", partial(call_segments, case, split))


def make(
    device: torch.device | str, B: int = 4, T: int = 2048, H: int = 64, HV: int = 64, K: int = 128, V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:  # fmt: skip
    """A call of Gated DeltaNet with what `solve` and `factor` make of it; 256 states walk through 32 chunks."""
    new = partial(torch.randn, B, T, device=device)
    q, k = (F.normalize(new(H, K), dim=-1).to(dtype) for _ in range(2))
    x = Inputs(q, k, new(HV, V).to(dtype), F.logsigmoid(new(HV) + 3), torch.sigmoid(new(HV)))
    kernels = Kernels(describe(x), x)
    kernels.solve()
    kernels.factor()
    made = kernels.factors._asdict() | {"A": kernels.solved.A, "vectors": kernels.solved.vectors}
    return made | {name: t for name, t in x._asdict().items() if t is not None}


def kernels_on(made: Tensors, factored: bool = True) -> Kernels:
    """Kernels that read what was made and write elsewhere."""
    x = Inputs(*(made[name] for name in ("q", "k", "v", "g", "beta")))
    kernels = Kernels(describe(x), x)
    kernels.solved = Solved(made["A"], made["vectors"], None)
    if factored:
        kernels.factors = Factors(made["X"], made["Y"], made["rates"])
    return kernels


def tune_factor(made: Tensors, t: Tile) -> Tensors:
    kernels = kernels_on(made, factored=False)
    kernels.factor(t)
    return kernels.factors._asdict()


def tune_scan(made: Tensors, t: Tile) -> Tensors:
    return kernels_on(made).scan(False, t)


def tune_scan_backward(made: Tensors, t: Tile) -> Tensors:
    return kernels_on(made).scan_backward(True, t)


def truth(made: Tensors) -> Tensors:
    """Of all three stages, in float64: every chunk in one segment of the reference, and then slot by slot."""
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


STAGES = {
    "factor": Stage((128, 128), factor_candidates, make, tune_factor, truth_of("X", "Y")),
    "scan": Stage((128, 128), scan_candidates, make, tune_scan, truth_of("o", "final_state")),
    "scan_backward": Stage((128, 128), scan_candidates, make, tune_scan_backward, truth_of("dstates", "dU")),
}
