"""Launches of the hand-written kernels for prompts on a pool of states, with one decay per value head."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list
from flash_delta.kernels.hopper.plans.tape import new_pool_tape
from flash_delta.kernels.hopper.plans.tiles import NARROW, SLIM, WIDE, LoopTile
from flash_delta.kernels.hopper.scalar.forward.loop import run_pool_loops
from flash_delta.kernels.hopper.scalar.forward.rates import new_rates, run_rates
from flash_delta.kernels.hopper.scalar.segments.maps import run_find_starts
from flash_delta.kernels.hopper.scalar.segments.memory import new_parts
from flash_delta.problem import Inputs, Pools, Problem, Slots
from workshop.gate.cases.rule import Planned, RuleCase, problem_of


def serving(
    width: int, dtype: torch.dtype, *, v_first: bool, checkpoints: bool, offsets: bool = False
) -> tuple[Problem, Inputs, Slots]:
    """A prefill on a pool of states."""
    p, x = problem_of(RuleCase(width, raw=True))
    index = torch.empty(p.N, dtype=torch.int32, device="meta")
    pool = torch.empty(8, p.HV, width, width, dtype=dtype, device="meta")
    kept = (index, index) if offsets else (index[:, None] if checkpoints else None, None)
    slots = Slots(pool, index, index, None, None, index.bool(), *kept)
    pools = Pools(dtype=dtype, checkpoint_every=64 * (not offsets), checkpoint_offsets=offsets)
    p = p._replace(pools=pools, state_v_first=v_first)
    return p, x._replace(initial_state=None), slots


def listed(width: int) -> tuple[Problem, Inputs, Slots]:
    """Packed sequences of lengths that only the device knows, without a pool."""
    p, x = problem_of(RuleCase(width, raw=True))
    return p, x, Slots(x.initial_state, None)


POOLS = {
    "pool": partial(serving, 128, torch.float32, v_first=False, checkpoints=False),
    "pool-v-first": partial(serving, 128, torch.float32, v_first=True, checkpoints=True),
    "pool-bfloat16": partial(serving, 128, torch.bfloat16, v_first=False, checkpoints=True),
    "pool-bfloat16-v-first": partial(serving, 128, torch.bfloat16, v_first=True, checkpoints=True),
    "pool-64": partial(serving, 64, torch.float16, v_first=True, checkpoints=True),
    "pool-offsets": partial(serving, 128, torch.float32, v_first=True, checkpoints=True, offsets=True),
    "pool-64-offsets": partial(serving, 64, torch.bfloat16, v_first=False, checkpoints=True, offsets=True),
}
FORMS = {64: {"slim": SLIM}, 128: {"wide": WIDE, "narrow": NARROW}}


PROCESSORS = 132  # with as many multiprocessors prompts are cut into parts


def call_pool(described: tuple[Problem, Inputs, Slots], t: LoopTile, *, parted: bool) -> None:
    """``parted``: prompts may be cut."""
    kernels = Planned(*described)
    c, made, p, (slots,) = kernels.c, kernels.made, kernels.p, kernels.more
    o, final = kernels.results()
    final = final if p.pools is None else slots.state_pool
    parts = new_parts(made, p, PROCESSORS, starts=1) if parted else None
    rates, prompts, tape = new_rates(made, p), new_prompt_list(made, p, 1), new_pool_tape(made, p, c.chip, 1)
    run_rates(c, o, rates, None, prompts, slots, tape, parts)
    if parts is not None:
        run_find_starts(c, rates, prompts, tape, parts, slots, final)
    run_pool_loops(c, o, rates, prompts, tape, parts, slots, final, t)
    kernels.launch()


def launches() -> Iterator[Launch]:
    for case, describe in POOLS.items():
        described = describe()
        for form, t in FORMS[described[0].K].items():
            yield Launch(f"{case}-{form}", partial(call_pool, described, t, parted=False))
            yield Launch(f"{case}-parts-{form}", partial(call_pool, described, t, parted=True))
    for width, forms in FORMS.items():
        for form, t in forms.items():
            yield Launch(f"listed-{width}-{form}", partial(call_pool, listed(width), t, parted=True))
