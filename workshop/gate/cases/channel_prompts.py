"""What the compile gate compiles for prompts on a pool with a decay per channel, on Hopper."""

from collections.abc import Iterator
from functools import partial

import torch

from flash_delta.compiler import Launch
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.prompts import run_channel_prompts
from flash_delta.kernels.hopper.channel.scan import run_scan_prompts
from flash_delta.kernels.hopper.device.work_items import Listed
from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list, run_list_prompts
from flash_delta.kernels.hopper.plans.tape import new_channel_tape
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE, ChannelTile
from flash_delta.kernels.runtime.pool_launches import PoolLaunch
from flash_delta.kernels.runtime.workspace import Prepared, make_groups
from flash_delta.problem import Inputs, Pools, Problem, Slots
from workshop.gate.cases.rule import Planned, RuleCase, problem_of


def serving(
    pool: torch.dtype = torch.float32, *, v_first: bool, raw: bool = True, bound: float | None = None,
    wide: bool = False, kept: str | None = None, strength: bool = False,
) -> tuple[Problem, Inputs, Slots]:  # fmt: skip
    """A prefill. ``wide``: g is float32. ``kept``: there are checkpoints at a "stride" or at an "offset"."""
    p, x = problem_of(RuleCase(gate="channel", raw=raw, bound=bound, strength=strength))
    x = x._replace(initial_state=None, g=x.g.float() if wide else x.g)
    index = torch.empty(p.N, dtype=torch.int32, device="meta")
    tables = {None: (None, None), "stride": (index[:, None], None), "offset": (index, index)}[kept]
    states = torch.empty(8, p.HV, p.K, p.V, dtype=pool, device="meta")
    p = p._replace(
        gate=p.gate._replace(dtype=x.g.dtype), state_v_first=v_first,
        pools=Pools(dtype=pool, checkpoint_every=64 * (kept == "stride"), checkpoint_offsets=kept == "offset"),
    )  # fmt: skip
    return p, x, Slots(states, index, index, None, None, index.bool(), *tables)


PROMPTS = {
    "channel-pool": partial(serving, v_first=False, bound=-5.0),
    "channel-pool-v-first": partial(serving, v_first=True, bound=-5.0, kept="stride"),
    "channel-pool-bfloat16": partial(serving, torch.bfloat16, v_first=False, bound=-5.0, kept="stride"),
    "channel-pool-float16-v-first": partial(serving, torch.float16, v_first=True, bound=-5.0, kept="offset"),
    "channel-pool-free": partial(serving, v_first=True, kept="stride"),
    "channel-pool-free-offsets": partial(serving, v_first=False, kept="offset"),
    "channel-pool-logs-float32": partial(serving, torch.bfloat16, v_first=True, raw=False, wide=True, kept="stride"),
    "channel-pool-promised-float32": partial(serving, v_first=False, raw=False, bound=-5.0, wide=True),
    "gdn2-pool": partial(serving, v_first=False, bound=-5.0, strength=True),
    "gdn2-pool-free": partial(serving, torch.bfloat16, v_first=True, kept="stride", strength=True),
    "gdn2-pool-logs-float32": partial(serving, v_first=True, raw=False, wide=True, kept="offset", strength=True),
}
FORMS = {"whole": CHANNEL_WHOLE, "half": CHANNEL_HALF, "scan": None}


def call_prompts(case: str, t: ChannelTile | None) -> None:
    """``t``: of the loop, or None for `prepare` and the scan."""
    kernels = Planned(*PROMPTS[case]())
    c, made, p, (slots,) = kernels.c, kernels.made, kernels.p, kernels.more
    o, prompts, tape = kernels.results().o, new_prompt_list(made, p), new_channel_tape(made, p, c.chip, p.N)
    run_list_prompts(c, o, prompts, tape, slots)
    if t is not None:
        run_channel_prompts(c, o, prompts, tape, slots, [PoolLaunch(t, p.N)])
    else:
        (w,), listed = make_groups(made, p, Prepared), Listed(prompts, 0, p.N)
        run_prepare(c, w, None, listed=listed)
        run_scan_prompts(c, w, o, slots, listed, p.N)
    kernels.launch()


def launches() -> Iterator[Launch]:
    for case in PROMPTS:
        for form, t in FORMS.items():
            yield Launch(f"{case}-{form}", partial(call_prompts, case, t))
