"""Plans the forward pass of the chunkwise rule.

Memory that kernels of a call pass to each other is named by its group (runtime/workspace.py). What is saved for the
backward pass is one buffer with some of these groups, so autograd keeps one tensor.
"""

import torch

from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Draft, Plan
from flash_delta.kernels.runtime.workspace import (
    Channels,
    Factors,
    Residual,
    Solved,
    count_bytes,
    groups_in,
    make_groups,
)
from flash_delta.kernels.triton.forward.channel import run_channel
from flash_delta.kernels.triton.forward.factor import run_factor
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.segments import new_segmented_scan, run_segmented_scan
from flash_delta.kernels.triton.forward.solve import run_solve
from flash_delta.kernels.triton.tiles import Segments
from flash_delta.problem import Inputs, Problem

HANDED = (Solved, Factors, Channels)  # passed from kernel to kernel in a call without gradients


def plan_forward(p: Problem, chip: Chip, x: Inputs, *, choice: Segments | None = None) -> Plan:
    """o, the final states, what is saved for the backward pass, and the states of chunks [slots, HV, V'', K'] unless
    they are saved. ``choice``: how sequences are split; None: they are not."""
    c = draft_of(p, chip, x, choice)
    o = c.made.new("o", p.o_shape, p.dtype)
    final = c.made.new("final_state", p.state_shape, torch.float32)
    saved, groups = None, {}
    if p.needs_grad:
        kept = saved_groups(p)
        saved = c.made.new("saved", (count_bytes(p, *kept),), torch.uint8)
        groups |= zip(kept, groups_in(saved, p, *kept), strict=True)
    handed = [group for group in HANDED if group not in groups]
    groups |= zip(handed, make_groups(c.made, p, *handed), strict=True)
    residual, states = groups.get(Residual), None
    if p.keep_states and residual is None:
        (residual,) = make_groups(c.made, p, Residual)
        states = residual.states
    solved, factors, channels = (groups[group] for group in HANDED)
    scans = run_chunks(c, solved, factors, channels)
    if choice is None or c.every:
        run_scan(scans, channels, solved, factors, o, final, residual)
    split = new_segmented_scan(p, None if c.every else choice, c.made)
    run_segmented_scan(scans, channels, solved, factors, o, final, split)
    return c.plan(o, final, saved, states)


def saved_groups(p: Problem) -> tuple[type, ...]:
    """What the forward pass saves: the results of `solve`, and with ``disable_recompute`` everything."""
    return (*HANDED, Residual) if p.disable_recompute else (Solved,)


def run_chunks(
    c: Draft, solved: Solved, factors: Factors, channels: Channels, *, saved: bool = False, valued: bool = True
) -> Draft:
    """Returns the draft for the scans. ``saved``: the results of `solve` were saved. ``valued``: see `run_channel`."""
    scans = run_channel(c, solved, channels, valued=valued) if c.p.gate.kind == "channel" else c
    if not saved:
        run_solve(c, channels, solved)
    if c.p.gate.kind != "channel":
        run_factor(c, solved, factors, follows=not saved)
    return scans
