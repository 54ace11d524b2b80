"""What the tuner times of the hand-written kernels: how many registers each role gets."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product, starmap
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

from flash_delta.kernels.hopper.channel.loop import run_channel_loop
from flash_delta.kernels.hopper.plans.tiles import SCAN_GRADIENTS, ChannelTile
from flash_delta.kernels.hopper.scalar.backward.plan import Kept, ScanBack, plan_backward
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.runtime.run import ByTriton, given_to
from flash_delta.kernels.triton.backward.results import OutputGradients
from flash_delta.problem import Inputs, Problem
from flash_delta.reference import backend
from workshop.gate.cases.members import describe
from workshop.gate.cases.rule import Planned, Tensors
from workshop.tune.stage import Stage

NAMES = "q", "k", "v", "g", "beta"


class BackTile(NamedTuple):
    """A tile of `scan_gradients`."""

    REGISTERS: int  # per thread of each state group; the gradient role gets the rest


def make(
    device: torch.device | str, B: int = 4, T: int = 2048, H: int = 16, HV: int = 32, K: int = 128, *, channels: bool,
) -> Tensors:  # fmt: skip
    """A call in bfloat16, with g and beta in float32, and the gradient of its output. With ``channels`` the decay is
    per channel."""
    new = partial(torch.randn, B, T, device=device)
    q, k = (F.normalize(new(H, K), dim=-1).bfloat16() for _ in range(2))
    g = F.logsigmoid(new(HV, K) + 3) if channels else F.logsigmoid(new(HV) + 3)
    made = dict(zip(NAMES, (q, k, new(HV, K).bfloat16(), g, torch.sigmoid(new(HV))), strict=True))
    return made | {"do": new(HV, K).bfloat16()}


def call_of(made: Tensors) -> tuple[Problem, Inputs]:
    x = Inputs(*(made[name] for name in NAMES))
    return describe(x, "channel" if x.g.dim() == 4 else "scalar")._replace(most_beta=1.0), x


def make_back(device: torch.device | str, **sizes: int) -> Tensors:
    """The call, and the tensors that its forward pass saves."""
    from flash_delta.kernels.hopper import backend as hopper

    made = make(device, **sizes, channels=False)
    p, x = call_of(made)
    return made | {"saved": hopper.forward(p._replace(needs_grad=True, batch_invariant=True), x).saved[0]}


def tune_scan_gradients(made: Tensors, t: BackTile) -> Tensors:
    """The backward pass of whole sequences: `scan_gradients`, and all launches before and after it."""
    p, x = call_of(made)
    p = p._replace(needs_grad=True, batch_invariant=True)
    groups = x, OutputGradients(made["do"], None), Kept(made["saved"], None)
    with patch.dict(SCAN_GRADIENTS[p.K], t._asdict()):
        plan = plan_backward(p, chip_of(p.device), *map(layouts_of, groups), choice=ScanBack(None))
    return dict(zip(NAMES, ByTriton(plan, given_to(plan, groups))(p.device, groups), strict=False))


def truth_back(made: Tensors) -> Tensors:
    p, x = call_of({name: made[name].double() for name in NAMES})
    d = backend.backward(p._replace(needs_grad=True), x, (), made["do"].double(), None)
    return dict(zip(NAMES, d, strict=False))


def tune_channel_loop(made: Tensors, t: ChannelTile) -> Tensors:
    p, x = call_of(made)
    kernels = Planned(p, x)
    results = kernels.results()
    run_channel_loop(kernels.c, *results, t)
    return kernels.launch(results)


def truth_channels(made: Tensors) -> Tensors:
    out = backend.forward(*call_of({name: made[name].double() for name in NAMES}))
    return {"o": out.o, "final_state": out.final_state}


def tiles_for(tiles: list[NamedTuple], target: str) -> list[NamedTuple]:
    if target != "sm_90a":
        raise ValueError(f"device: expected a GPU sm_90a, for which these kernels are, got {target}")
    return tiles


def stage(tiles: Iterable[NamedTuple], *steps: Callable) -> Stage:
    return Stage((128,), partial(tiles_for, list(tiles)), *steps)


def loop_stage(tiles: Iterable[tuple[int, ...]], **sizes: int) -> Stage:
    make_channels = partial(make, H=32, channels=True, **sizes)
    return stage(starmap(ChannelTile, tiles), make_channels, tune_channel_loop, truth_channels)


STAGES = {
    "scan_gradients": stage(map(BackTile, (128, 136, 144, 152, 160)), make_back, tune_scan_gradients, truth_back),
    "channel_loop": loop_stage(product((2,), (112, 120, 128, 136), (96, 104, 112))),
    "channel_loop-half": loop_stage(product((1,), (144, 168, 184), (112, 136, 152)), B=2),
}
