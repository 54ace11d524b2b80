"""What the compile gate compiles: the launchers, on problems that models have."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.launch import new_rates, run_loop, run_rates
from flash_delta.kernels.hopper.launch_segments import new_walk, new_whole_walk, run_walk
from flash_delta.kernels.hopper.tiles import NARROW, SLIM, WIDE, Tile
from flash_delta.kernels.triton.launcher import Call, make_call
from flash_delta.kernels.triton.launches import Case, describe, problem_of
from flash_delta.kernels.triton.workspace import Solved, Workspace
from flash_delta.problem import Inputs, Problem


def batched() -> tuple[Problem, Inputs]:
    """Batch rows instead of packed sequences, whose states start from zero and have their values first."""
    new = partial(torch.empty, 2, 192, device="meta")
    q, v, g = new(2, 128, dtype=torch.bfloat16), new(4, 128, dtype=torch.bfloat16), new(4)
    x = Inputs(q, q, v, g, g)
    return describe(x)._replace(state_v_first=True), x


def alike() -> tuple[Problem, Inputs]:
    """As many key heads as value heads, with norms: a program of `rates` has one head."""
    p, x = problem_of(Case())
    return p._replace(H=p.HV, l2norm=True), x._replace(q=x.v, k=x.v)


def training(width: int) -> tuple[Problem, Inputs]:
    p, x = problem_of(Case(width, raw=True))
    return p._replace(needs_grad=True), x


CASES = {
    "packed": partial(problem_of, Case()),
    "packed-raw": partial(problem_of, Case(raw=True)),
    "packed-float16": partial(problem_of, Case(dtype=torch.float16)),
    "batched": batched,
    "training": partial(training, 128),
    "packed-64": partial(problem_of, Case(64)),
    "training-64": partial(training, 64),
    "packed-256": partial(problem_of, Case(256)),
    "training-256": partial(training, 256),
}
RATES = CASES | {"packed-alike": alike}
FORMS = {64: {"slim": SLIM}, 128: {"wide": WIDE, "narrow": NARROW}, 256: {}}


def call_rates(case: str) -> None:
    c, o, _, rates, solved = described(case)
    run_rates(c, o, rates, solved)


def call_loop(case: str, t: Tile) -> None:
    c, *outputs, solved = described(case)
    run_loop(c, *outputs, solved and solved.A, t)


def call_walk(case: str) -> None:
    c, *outputs, _ = described(case)
    run_walk(c, *outputs, new_walk(c.p, 128) if c.p.K == 128 else new_whole_walk(c.p))


def described(case: str) -> tuple[Call, Tensor, Tensor, Tensor, Solved | None]:
    """The call, o, the final states, rates, and what the backward pass needs."""
    p, x = RATES[case]()
    c = make_call(p, x, ("launches",))._replace(direct=False)
    solved = Workspace(p, Solved).views()[0] if p.needs_grad else None
    return c, torch.empty_like(x.v), torch.empty(p.state_shape, device="meta"), new_rates(p), solved


def launches(target: str) -> Iterator[Launch]:
    if target != "sm_90a":
        return
    for case in RATES:
        yield Launch(case, partial(call_rates, case))
    for case, made in CASES.items():
        width = made()[0].K
        for form, t in FORMS[width].items():
            yield Launch(f"{case}-{form}", partial(call_loop, case, t))
        if width > 64:
            yield Launch(f"{case}-segments" if width == 128 else f"{case}-whole", partial(call_walk, case))
