"""A decay per key channel: which calls come here, and the plans of their passes.

In the backward pass ``triton`` scans the states. Before that `prepare` runs in place of `channel` and `solve`. After
that `chunk_back` runs if it can (channel/backward/).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flash_delta.kernels.hopper.channel import backward
from flash_delta.kernels.hopper.channel.forget import new_forgets, run_find_forgetting
from flash_delta.kernels.hopper.channel.loop import run_channel_loop
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.scan import run_scan_channels
from flash_delta.kernels.hopper.plans.boxes import as_taken, describe
from flash_delta.kernels.hopper.plans.splits import CHANNEL_TILES, channel_tile, loop_parts, may_scan_channels
from flash_delta.kernels.hopper.plans.tape import new_channel_tape, new_tape
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_PACE, CHANNEL_WHOLE, ChannelTile, needs_tape
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip, chip_of
from flash_delta.kernels.runtime.plan import EVERY, Draft, Layout, Making, Plan
from flash_delta.kernels.runtime.workspace import (
    Channels,
    DeepChunks,
    Factors,
    Prepared,
    Solved,
    count_bytes,
    groups_in,
    make_groups,
)
from flash_delta.kernels.triton import backward as triton_backward
from flash_delta.kernels.triton import forward as triton_forward
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved
from flash_delta.kernels.triton.tiles import Segments, plan_segments
from flash_delta.problem import Inputs, Problem

GATES = "g", "b", "w"  # besides q, k and v, what the copy engine loads


class SequenceParts(NamedTuple):
    """How sequences are scanned in parts if gates forget."""

    forgets: Layout  # for each part, except first ones, whether gates forget before it
    parts: int  # 1: sequences are not cut


class Scan(NamedTuple):
    """How sequences are scanned."""

    tile: ChannelTile | None  # of the loop, if it does everything
    taped: bool = False  # programs of the loop share sequences
    split: Segments | None = None  # otherwise how `triton` splits sequences; None: they are not split
    parts: int = 1  # into which the loop cuts them if gates forget; 1: they are not cut


def unsupported(p: Problem) -> str | None:
    """Why these kernels cannot run ``p``, a problem with a decay per channel. None if they can."""
    if p.dtype != torch.bfloat16 or (p.K, p.V) != (128, 128):
        return f"with a decay per channel it runs heads of 128 in bfloat16; they are {p.K} and {p.V} in {p.dtype}"
    if p.gate.dtype not in (torch.bfloat16, torch.float32):
        return f"with a decay per channel g has to be torch.bfloat16 or torch.float32, it is {p.gate.dtype}"
    if p.strength_dtype not in (None, p.dtype):
        return f"gates b and w have to be {p.dtype}, one of them is {p.strength_dtype}"
    return None


def remark(p: Problem) -> str:
    scan = choose_forward(p, chip_of(p.device))
    if scan.tile is not None:
        said = ["one kernel does it all"]
    elif scan.parts > 1:
        said = [f"it scans half a state per program; where gates forget one kernel does it all in {scan.parts} parts"]
    elif scan.split is not None:
        said = [f"'triton' scans sequences in segments of {scan.split.length} tokens"]
    else:
        said = ["'triton' scans the states" if _scans(p) else "it scans half a state per program"]
    if p.needs_grad:
        said.append(f"'triton' scans the states back{_found(p)}")
    return "; ".join(said)


def choose_forward(p: Problem, chip: Chip) -> Scan:
    tile = None if _scans(p) else channel_tile(p, chip)
    if tile is not None:
        return Scan(tile, tile == CHANNEL_WHOLE and needs_tape(p, chip.processors, CHANNEL_PACE))
    split = plan_segments(p, chip)
    parted = split is None and not _scans(p) and _may_part(p, chip)
    return Scan(None, split=split, parts=loop_parts(p, chip) if parted else 1)


def plan_forward(p: Problem, chip: Chip, x: Inputs, *, choice: Scan) -> Plan:
    """o, the final states, and what is saved for the backward pass. The call has tokens and sequences."""
    made, saved, kept = Making(), None, ()
    c = draft_of(p, chip, as_taken(made, x, *GATES), choice, made)
    o = made.new("o", (p.B, p.T, p.HV, p.V), p.dtype)
    final = made.new("final_state", p.state_shape, torch.float32)
    if saves(p):
        saved = made.new("saved", (saved_bytes(p),), torch.uint8)
        kept = groups_in(saved, p, *triton_forward.plan.saved_groups(p))
    if c.every and can_loop(p):
        for t in CHANNEL_TILES:
            run_channel_loop(c, o, final, t)
        run_channel_loop(c, o, final, CHANNEL_WHOLE, tape=new_tape(made, p, 1, CHANNEL_PACE))
    elif not c.every and choice.tile is not None:
        tape = new_channel_tape(made, p, chip, p.N) if choice.taped else None
        run_channel_loop(c, o, final, choice.tile, tape=tape)
        return c.plan(o, final, saved)
    parting = SequenceParts(new_forgets(made), 2 if c.every else choice.parts)
    if _may_part(p, chip) if c.every else choice.parts > 1:
        run_find_forgetting(c, *parting)
        run_channel_loop(c, o, final, CHANNEL_WHOLE, *parting)
    _prepare_and_scan(c, kept, o, final, None if c.every else choice.split, parting)
    return c.plan(o, final, saved)


def plan_backward(
    p: Problem, chip: Chip, x: Inputs, after: OutputGradients, given: Saved, *, choice: Segments | None
) -> Plan:  # fmt: skip
    """The gradients of all inputs but the bounds, as of the `plan_backward` of ``triton``."""
    made, on_chunks = Making(), triton_backward.chunks
    chunks = on_chunks.CHUNKS._replace(prepare=_prepare_again)
    taken = as_taken(made, x._replace(initial_state=None), *GATES)._replace(initial_state=x.initial_state)
    if backward.run.unsupported(p) is None:
        chunks = on_chunks.Chunks((DeepChunks,), _prepare_again, backward.run.find_gradients)
        after = after._replace(do=describe(made, after.do))
    return triton_backward.plan.plan_backward(p, chip, taken, after, given, choice=choice, chunks=chunks, made=made)


def plan_usual_backward(p: Problem, chip: Chip, x: Inputs, choice: Any = EVERY) -> Plan | None:
    """The backward pass of most calls (triton/backward/plan.py). None without gradients."""
    if not p.needs_grad:
        return None
    plan_usual = triton_backward.plan.plan_usual_backward
    return plan_usual(p, chip, x, plan_backward, saved_bytes=saved_bytes(p), choice=choice)


later = plan_usual_backward  # what is compiled together with a forward pass


def _found(p: Problem) -> str:
    """What `remark` says about the kernels after the scan back."""
    reason = backward.run.unsupported(p)
    return ", and finds the gradients of chunks: " + reason if reason else ""


def _prepare_again(c: Draft, memory: dict[type, Any], saved: bool) -> Draft:
    """Launches `prepare` for the backward pass. If A has been ``saved``, it is not written."""
    channels, solved = memory[Channels], memory[Solved]
    out = _prepared(channels, solved)
    return run_prepare(c, out._replace(A=None) if saved else out, None, channels.L, solved)


def _prepared(channels: Channels, solved: Solved) -> Prepared:
    """The memory of `channel` and `solve`, as `prepare` takes it."""
    return Prepared(*channels[:4], solved.A, channels.gamma, channels.rates)


def can_loop(p: Problem) -> bool:
    """Whether `channel_loop` can run ``p``. If it can, the forward pass saves nothing, whichever kernels run. The
    backward pass then computes A again."""
    return not p.writes_states


def saves(p: Problem) -> bool:
    """Whether the forward pass saves anything for the backward pass."""
    return p.needs_grad and not can_loop(p)


def saved_bytes(p: Problem) -> int | None:
    """How many bytes the forward pass saves. None: nothing."""
    return count_bytes(p, *triton_forward.plan.saved_groups(p)) if saves(p) else None


def _scans(p: Problem) -> bool:
    """Whether `scan` scans the states if the loop does not. With ``batch_invariant`` it always does, since other
    sequences would decide about another way."""
    return p.batch_invariant or not can_loop(p)


def _may_part(p: Problem, chip: Chip) -> bool:
    """Whether sequences of some sizes are cut into parts. With raw gates without a bound `find_forgetting` takes more
    time than a trained model could gain. With a strength per channel erases may stretch the state: two keys in turn by
    2^44 in EARLY tokens (docs/mathematics.md, N4). So decays alone do not say that a state is forgotten."""
    free = p.gate.raw and p.gate.bound is None
    return can_loop(p) and not free and not p.channel_strength and may_scan_channels(p, chip)


def _prepare_and_scan(
    c: Draft, saved: Sequence[Any], o: Layout, final: Layout, split: Segments | None, parting: SequenceParts
) -> None:  # fmt: skip
    """Launches `prepare`, and the kernels that scan the states. ``saved``: the groups of what is saved. If there are
    any, they have all that kernels pass to each other."""
    p = c.p
    if saved:
        solved, factors, channels, residual = saved
        scans = run_prepare(c, _prepared(channels, solved), o, channels.L, solved, valued=True)
        triton_forward.scan.run_scan(scans, channels, solved, factors, o, final, residual)
        return
    (w,) = make_groups(c.made, p._replace(N=1, T=1) if c.every else p, Prepared)
    by_hand, scans = split is None and not _scans(p), c
    if by_hand:
        run_prepare(c, w, o, None, None, *parting)
        run_scan_channels(c, w, o, final, *parting)
    if not by_hand or (c.every and p.channel_strength):  # kernels of `triton` scan w . v
        scans = run_prepare(c, w, o, None, None, *parting, valued=True)
    channels = Channels(w.Qg, w.Kg, w.Kd, w.P, None, w.gamma, w.rates)
    given = scans, channels, Solved(w.A, None, None), Factors(None, None, None), o, final
    if split is None and not by_hand:
        triton_forward.scan.run_scan(*given, None)
    if split is not None or c.every:
        segments = triton_forward.segments
        segments.run_segmented_scan(*given, segments.new_segmented_scan(p, split, c.made))
