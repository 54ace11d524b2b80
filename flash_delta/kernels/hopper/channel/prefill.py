"""Prompts on a pool with a decay per channel: which calls come here, and what they launch."""

import torch
from torch import Tensor

from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.prompts import run_channel_prompts
from flash_delta.kernels.hopper.channel.scan import run_scan_prompts
from flash_delta.kernels.hopper.device.work_items import Listed
from flash_delta.kernels.hopper.plans.boxes import as_taken, describable, described
from flash_delta.kernels.hopper.plans.prompt_list import new_prompt_list, run_list_prompts
from flash_delta.kernels.hopper.plans.splits import channel_pool_launches
from flash_delta.kernels.hopper.plans.tape import new_channel_tape
from flash_delta.kernels.hopper.plans.unplanned import new_convolved, with_contiguous_vectors
from flash_delta.kernels.runtime.calls import Call, make_call, on, opened
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.launch import output_of, remember_served, run
from flash_delta.kernels.runtime.pool_launches import PoolLaunch, prompts_at_most
from flash_delta.kernels.runtime.workspace import Prepared, Workspace
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.offsets import run_scan_to_offset
from flash_delta.kernels.triton.serving.prompts import convolved_bytes, run_after, run_before
from flash_delta.problem import Around, Inputs, KnownCall, Problem, Slots

PREFILL = ("prefill", "hopper", "channel")  # the kind of these calls


def remark(p: Problem) -> str:
    """What `explain` says."""
    first, *more = channel_pool_launches(p, chip_of(p.device), every=False)
    if first.tile is not None:
        return "one kernel scans the prompts"
    others = f"; one kernel scans more than {first.most} prompts" if more else ""
    return f"it scans half a state per program{others}"


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, for calls with tokens and sequences. `decode` runs short sequences beside the others."""
    o, prompts, convolved, chip = output_of(p, s), new_prompt_list(p), new_convolved(p), chip_of(p.device)
    planned = channel_pool_launches(p, chip, every=False)
    tape = new_channel_tape(p, chip, planned[-1].sequences)
    handed = _new_handed(p, planned)

    def kernels(c: Call) -> None:
        slots, nearby = opened(c)
        rule = run_before(c, slots, nearby, convolved)
        launches = channel_pool_launches(p, chip, every=True) if c.every else planned
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=True)
        run_list_prompts(rule, o, prompts, tape, slots)
        for launch in launches:
            if launch.tile is None:
                _prepare_and_scan(rule, handed or Workspace(p._replace(N=1, T=1), Prepared), o, prompts, slots, launch)
        looped = [launch for launch in launches if launch.tile is not None]
        run_channel_prompts(rule, o, prompts, tape, slots, looped)
        if not p.batch_invariant:
            run_decode(rule, slots, o)
        if p.pools.checkpoint_offsets:
            run_scan_to_offset(rule, slots, before=False)
        run_after(c, slots, nearby, o)

    with on(p.device):
        given = with_contiguous_vectors(x._replace(g=described(x.g))) if p.pools.taps else as_taken(x, "g")
        call = make_call(p, given, PREFILL, *s._replace(out=None), *around, known=known)
        run(call, kernels, o, spare=(prompts, *tape.memory, *(() if handed is None else (handed.buffer,)), *convolved))
    remember_served(call, x, known, PREFILL)
    return o


def _prepare_and_scan(
    c: Call, handed: Workspace, o: Tensor, prompts: Tensor, slots: Slots, launch: PoolLaunch
) -> None:  # fmt: skip
    """``handed`` has room for as many prompts as the tokens allow. If more are listed, bounds are wrong, and neither
    kernel works."""
    (w,), listed = handed.views(), Listed(prompts, launch.least, min(launch.most, prompts_at_most(c.p)[0]))
    run_prepare(c, w, None, listed=listed)
    run_scan_prompts(c, w, o, slots, listed, launch.sequences)


def _new_handed(p: Problem, launches: tuple[PoolLaunch, ...]) -> Workspace | None:
    """What `prepare` hands to the scan, for the chunks of all prompts. None if the loop scans all of them."""
    if all(launch.tile is not None for launch in launches):
        return None
    return Workspace(p._replace(N=prompts_at_most(p)[0]), Prepared)


def workspace_bytes(p: Problem, x: Inputs) -> int:
    """How many bytes ``prefill`` allocates besides its output. Only the layout of ``x`` matters."""
    nowhere, copied = p._replace(device=torch.device("meta")), (x.g,) if p.pools.taps else (*x[:3], x.g)
    chip = chip_of(p.device)
    planned = channel_pool_launches(p, chip, every=False)
    handed, tape = _new_handed(nowhere, planned), new_channel_tape(nowhere, chip, planned[-1].sequences)
    own = sum(t.nbytes for t in (new_prompt_list(nowhere), *tape.memory))
    own += 0 if handed is None else handed.buffer.nbytes
    return own + sum(t.nbytes for t in copied if not describable(t)) + convolved_bytes(p)
