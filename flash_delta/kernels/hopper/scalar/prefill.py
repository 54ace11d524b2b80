"""Plans prompts on a pool with one decay per value head."""

from typing import Any

from flash_delta.kernels.hopper.plans.boxes import describe
from flash_delta.kernels.hopper.scalar.listed import new_listed_scan, run_listed_scan
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Draft, Layout, Making, Plan
from flash_delta.kernels.triton.serving.prefill import plan_prompts
from flash_delta.problem import Around, Inputs, Problem, Slots


def plan_prefill(p: Problem, chip: Chip, x: Inputs, s: Slots, around: Around, *, choice: Any = None) -> Plan:
    """o. The pools are written in place."""
    made = Making()
    if not p.pools.taps:
        x = x._replace(q=describe(made, x.q), k=describe(made, x.k), v=describe(made, x.v))
    return plan_prompts(_scan, made, p, chip, x, s, around, choice)


def _scan(c: Draft, o: Layout, s: Slots) -> None:
    run_listed_scan(c, o, new_listed_scan(c.made, c.p, c.chip), s, s.state_pool)
