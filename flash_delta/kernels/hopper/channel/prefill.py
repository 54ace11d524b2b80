"""Prompts on a pool with a decay per channel: what they launch."""

from typing import Any

from flash_delta.kernels.hopper.channel.plan import GATES
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.prompts import run_channel_prompts
from flash_delta.kernels.hopper.channel.scan import run_scan_prompts
from flash_delta.kernels.hopper.device.work_items import Listed
from flash_delta.kernels.hopper.plans.boxes import as_taken, described
from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list, run_list_prompts
from flash_delta.kernels.hopper.plans.splits import channel_pool_launches
from flash_delta.kernels.hopper.plans.tape import new_channel_tape
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.kernels.runtime.plan import Draft, Layout, Making, Plan
from flash_delta.kernels.runtime.pool_launches import PoolLaunch, prompts_at_most
from flash_delta.kernels.runtime.workspace import Prepared, make_groups
from flash_delta.kernels.triton.serving.prefill import plan_prompts
from flash_delta.problem import Around, Inputs, Problem, Slots


def remark(p: Problem) -> str:
    """What `explain` says."""
    first, *more = channel_pool_launches(p, chip_of(p.device), every=False)
    if first.tile is not None:
        return "one kernel scans the prompts"
    others = f"; one kernel scans more than {first.most} prompts" if more else ""
    return f"it scans half a state per program{others}"


def plan_prefill(p: Problem, chip: Chip, x: Inputs, s: Slots, around: Around, *, choice: Any = None) -> Plan:
    """o, for calls with tokens and sequences. The pools are written in place."""
    made = Making()
    taken = described(made, x, *GATES) if p.pools.taps else as_taken(made, x, *GATES)
    return plan_prompts(_scan, made, p, chip, taken, s, around, choice)


def _scan(c: Draft, o: Layout, s: Slots) -> None:
    planned = launches = channel_pool_launches(c.p, c.chip, every=False)
    if c.every:
        launches = channel_pool_launches(c.p, c.chip, every=True)
    prompts, tape = new_prompt_list(c.made, c.p), new_channel_tape(c.made, c.p, c.chip, planned[-1].sequences)
    run_list_prompts(c, o, prompts, tape, s)
    _prepare_and_scan(c, o, prompts, s, [launch for launch in launches if launch.tile is None])
    run_channel_prompts(c, o, prompts, tape, s, [launch for launch in launches if launch.tile is not None])


def _prepare_and_scan(c: Draft, o: Layout, prompts: Layout, slots: Slots, launches: list[PoolLaunch]) -> None:
    """There is room for as many prompts as the tokens allow. If more are listed, bounds are wrong, and neither kernel
    works."""
    most = prompts_at_most(c.p)[0]
    for launch in launches:
        (w,) = make_groups(c.made, c.p._replace(N=most), Prepared)
        listed = Listed(prompts, launch.least, min(launch.most, most))
        run_prepare(c, w, None, listed=listed)
        run_scan_prompts(c, w, o, slots, listed, launch.sequences)
