"""What the compile gate compiles: the launchers, on problems that models have."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.launch import new_rates, run_loop, run_rates
from flash_delta.kernels.hopper.launch_segments import new_walk, run_walk
from flash_delta.kernels.hopper.tiles import NARROW, WIDE, Tile
from flash_delta.kernels.triton.launcher import Call, make_call
from flash_delta.kernels.triton.launches import Case, describe, problem_of
from flash_delta.problem import Inputs, Problem


def batched() -> tuple[Problem, Inputs]:
    """Batch rows instead of packed sequences, whose states start from zero and have their values first."""
    new = partial(torch.empty, 2, 192, device="meta")
    q, v, g = new(2, 128, dtype=torch.bfloat16), new(4, 128, dtype=torch.bfloat16), new(4)
    x = Inputs(q, q, v, g, g)
    return describe(x)._replace(state_v_first=True), x


CASES = {
    "packed": partial(problem_of, Case()),
    "packed-raw": partial(problem_of, Case(raw=True)),
    "packed-float16": partial(problem_of, Case(dtype=torch.float16)),
    "batched": batched,
}


def call_rates(case: str) -> None:
    c, o, _, rates = described(case)
    run_rates(c, o, rates)


def call_loop(case: str, t: Tile) -> None:
    c, *outputs = described(case)
    run_loop(c, *outputs, t)


def call_walk(case: str) -> None:
    c, *outputs = described(case)
    run_walk(c, *outputs, new_walk(c.p, 128))


def described(case: str) -> tuple[Call, Tensor, Tensor, Tensor]:
    """The call, o, the final states and rates."""
    p, x = CASES[case]()
    c = make_call(p, x, ("launches",))._replace(direct=False)
    return c, torch.empty_like(x.v), torch.empty(p.state_shape, device="meta"), new_rates(p)


def launches(target: str) -> Iterator[Launch]:
    if target != "sm_90a":
        return
    for case in CASES:
        yield Launch(case, partial(call_rates, case))
        for form, t in (("wide", WIDE), ("narrow", NARROW)):
            yield Launch(f"{case}-{form}", partial(call_loop, case, t))
        yield Launch(f"{case}-segments", partial(call_walk, case))
