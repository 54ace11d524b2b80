"""Plans the prefill of prompts on a pool of states."""

from collections.abc import Callable
from typing import Any

from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Draft, Layout, Making, Plan
from flash_delta.kernels.runtime.workspace import make_groups
from flash_delta.kernels.triton import forward
from flash_delta.kernels.triton.serving import offsets
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.prompts import make_convolved, run_after, run_before
from flash_delta.problem import Around, Inputs, Problem, Slots


def plan_prefill(p: Problem, chip: Chip, x: Inputs, s: Slots, around: Around, *, choice: Any = None) -> Plan:
    """o. The pools are written in place."""
    return plan_prompts(_scan, Making(), p, chip, x, s, around, choice)


def _scan(c: Draft, o: Layout, s: Slots) -> None:
    solved, factors, channels = make_groups(c.made, c.p, *forward.plan.HANDED)
    scans = forward.plan.run_chunks(c, solved, factors, channels)
    forward.scan.run_scan(scans, channels, solved, factors, o, None, None, slots=s)


def plan_prompts(
    scan: Callable[[Draft, Layout, Slots], None], made: Making, p: Problem, chip: Chip, x: Inputs, s: Slots,
    around: Around, choice: Any,
) -> Plan:  # fmt: skip
    """A prefill whose long sequences ``scan`` scans. `decode` runs short ones beside them. ``made``: copies in x."""
    c = draft_of(p, chip, x, choice, made)
    o = made.new("o", (p.B, p.T, p.HV, p.V), p.dtype) if s.out is None else s.out
    rule = run_before(c, s, around, make_convolved(made, p))
    if p.pools.checkpoint_offsets:
        offsets.run_scan_to_offset(rule, s, before=True)
    scan(rule, o, s)
    if not p.batch_invariant:
        run_decode(rule, s, o)
    if p.pools.checkpoint_offsets:
        offsets.run_scan_to_offset(rule, s, before=False)
    run_after(c, s, around, o)
    return c.plan(o)
