"""A decay per key channel: which calls come here, and what they launch.

In the backward pass ``triton`` scans the states. Before that `prepare` runs in place of `channel` and `solve`. After
that `chunk_back` runs if it can (channel/backward/).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.hopper.channel.backward import run as channel_backward
from flash_delta.kernels.hopper.channel.forget import new_forgets, run_find_forgetting
from flash_delta.kernels.hopper.channel.loop import run_channel_loop
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.scan import run_scan_channels
from flash_delta.kernels.hopper.plans.boxes import as_taken, described
from flash_delta.kernels.hopper.plans.splits import CHANNEL_TILES, channel_tile, loop_parts, may_scan_channels
from flash_delta.kernels.hopper.plans.tape import new_channel_tape, new_tape
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_PACE, CHANNEL_WHOLE, ChannelTile, needs_tape
from flash_delta.kernels.hopper.plans.unplanned import CHUNKS, Chunks, backward_by, for_backward, later_by
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.launch import Kernels, again, remember, run
from flash_delta.kernels.runtime.workspace import Channels, DeepChunks, Factors, Prepared, Solved, Workspace
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.segments import SegmentedScan, new_segmented_scan, run_segmented_scan
from flash_delta.kernels.triton.tiles import plan_segments
from flash_delta.problem import Inputs, KnownCall, Outputs, Problem

FORWARD = ("hopper", "channel")  # the kind of these calls


class SequenceParts(NamedTuple):
    """How sequences are scanned in parts if gates forget."""

    forgets: Tensor  # for each part, except first ones, whether gates forget before it
    parts: int  # 1: sequences are not cut


def unsupported(p: Problem) -> str | None:
    """Why these kernels cannot run ``p``, a problem with a decay per channel. None if they can."""
    if p.dtype != torch.bfloat16 or (p.K, p.V) != (128, 128):
        return f"with a decay per channel it runs heads of 128 in bfloat16; they are {p.K} and {p.V} in {p.dtype}"
    if p.gate.dtype not in (torch.bfloat16, torch.float32):
        return f"with a decay per channel g has to be torch.bfloat16 or torch.float32, it is {p.gate.dtype}"
    return None


def remark(p: Problem) -> str:
    chip = chip_of(p.device)
    split = plan_segments(p, chip)
    if _loop(p) is not None:
        said = ["one kernel does it all"]
    elif _parts(p, split) > 1:
        said = [
            f"it scans half a state per program; where gates forget one kernel does it all in {_parts(p, split)} parts"
        ]
    elif split is not None:
        said = [f"'triton' scans sequences in segments of {split.length} tokens"]
    else:
        said = ["'triton' scans the states" if _scans(p) else "it scans half a state per program"]
    if p.needs_grad:
        said.append(f"'triton' scans the states back{_found(p)}")
    return "; ".join(said)


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """Runs the forward pass of calls that have tokens and sequences."""
    kind = *FORWARD, p.needs_grad, p.writes_states
    made = again(known, (p.lengths, *kind), x)
    if made is not None:
        return Outputs(*made[:2], made[2:])
    given, x = x, as_taken(x, "g")
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(*p.state_shape, dtype=torch.float32, device=p.device)
    saved = for_backward(p) if saves(p) else None
    buffers = () if saved is None else (saved.buffer,)
    split, tile = plan_segments(p, chip_of(p.device)), _loop(p)
    handed = None if tile or p.writes_states else Workspace(p, Prepared)
    segments = None if tile else new_segmented_scan(p, split)
    parting = SequenceParts(new_forgets(p), _parts(p, split))
    taped = tile == CHANNEL_WHOLE and needs_tape(p, chip_of(p.device).processors, CHANNEL_PACE)
    tape = new_channel_tape(p, chip_of(p.device), p.N) if taped else None

    def kernels(c: Call) -> None:
        if c.every and can_loop(p):
            for t in CHANNEL_TILES:
                run_channel_loop(c, o, final, t)
            run_channel_loop(c, o, final, CHANNEL_WHOLE, tape=new_tape(p, 1, CHANNEL_PACE))
        elif tile:
            run_channel_loop(c, o, final, tile, tape=tape)
        if parting.parts > 1 or (c.every and _may_part(p)):
            run_find_forgetting(c, *parting)
            run_channel_loop(c, o, final, CHANNEL_WHOLE, *parting)
        if not tile:
            _prepare_and_scan(c, handed, saved, o, final, segments, parting)
        elif c.every:
            _prepare_and_scan(c, Workspace(p._replace(N=1, T=1), Prepared), None, o, final, None, parting)

    with on(p.device):
        call = make_call(p, x, kind, known=known, name=(*kind, split, tile, tape is None))
        handed_on = () if handed is None else (handed.buffer,)
        laid = () if tape is None else tape.memory
        spare = laid if tile else (parting.forgets, *handed_on, *(segments or ())[1:])
        later = partial(_later_call, p, x) if p.needs_grad else None
        run(call, kernels, o, final, *buffers, spare=spare, later=later)
    remember(call, given, known, (p.lengths, *kind))
    return Outputs(o, final, buffers)


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """Gradients of every input."""
    given = _taken_back(x)
    do = do if channel_backward.unsupported(p) is not None else described(do)
    return backward_by(_chunks(p), p, given, saved, do, dfinal, known)


def _later_call(p: Problem, x: Inputs) -> tuple[Call, Kernels]:
    """The backward call of most forward calls with ``x``."""
    return later_by(_chunks(p), p, _taken_back(x), saves(p))


def _taken_back(x: Inputs) -> Inputs:
    """The result of `as_taken`, but with the initial states as given, since `triton` scans from them."""
    return as_taken(x._replace(initial_state=None), "g")._replace(initial_state=x.initial_state)


def _chunks(p: Problem) -> Chunks:
    """The kernels that run before and after the scan of the backward pass."""
    if channel_backward.unsupported(p) is None:
        return Chunks("hopper", (DeepChunks,), _prepare_again, channel_backward.find_gradients)
    return CHUNKS._replace(name="hopper prepares", prepare=_prepare_again)


def _found(p: Problem) -> str:
    """What `remark` says about the kernels after the scan back."""
    reason = channel_backward.unsupported(p)
    return ", and finds the gradients of chunks: " + reason if reason else ""


def _prepare_again(c: Call, memory: tuple[Workspace, ...], anew: bool) -> None:
    """Launches `prepare` for the backward pass. Unless ``anew``, A has been saved."""
    solved, _, channels = [group for w in memory for group in w.views()][:3]
    out = _prepared(channels, solved)
    run_prepare(c, out if anew else out._replace(A=None), None, channels.L, solved)


def _prepared(channels: Channels, solved: Solved) -> Prepared:
    """The memory of `channel` and `solve`, as `prepare` takes it."""
    return Prepared(*channels[:4], solved.A, channels.gamma, channels.rates)


def _with_saved(w: Prepared, solved: Solved | None = None) -> Prepared:
    return w if solved is None else w._replace(A=solved.A)


def can_loop(p: Problem) -> bool:
    """Whether `channel_loop` can run ``p``. If it can, the forward pass saves nothing, whichever kernels run. The
    backward pass then computes A again."""
    return not p.writes_states


def saves(p: Problem) -> bool:
    """Whether the forward pass saves anything for the backward pass."""
    return p.needs_grad and not can_loop(p)


def _scans(p: Problem) -> bool:
    """Whether `scan` scans the states if the loop does not. With ``batch_invariant`` it always does, since other
    sequences would decide about another way."""
    return p.batch_invariant or not can_loop(p)


def _loop(p: Problem) -> ChannelTile | None:
    """The tile of the loop, if it does everything."""
    return None if _scans(p) else channel_tile(p, chip_of(p.device))


def _parts(p: Problem, split: object) -> int:
    """The number of parts into which sequences are cut if gates forget. 1: they are not cut."""
    scanned = split is None and not _scans(p) and _loop(p) is None
    return loop_parts(p, chip_of(p.device)) if scanned and _may_part(p) else 1


def _may_part(p: Problem) -> bool:
    """Whether sequences of some sizes are cut into parts. With raw gates without a bound `find_forgetting` takes more
    time than a trained model could gain."""
    free = p.gate.raw and p.gate.bound is None
    return can_loop(p) and not free and may_scan_channels(p, chip_of(p.device))


def _prepare_and_scan(
    c: Call, handed: Workspace | None, saved: Workspace | None, o: Tensor, final: Tensor,
    segments: SegmentedScan | None, parting: SequenceParts,
) -> None:  # fmt: skip
    groups = [] if saved is None else saved.views()
    if handed is None:
        solved, _, channels, _ = groups
        run_prepare(c, _prepared(channels, solved), o, channels.L, solved)
    else:
        solved = groups[0] if groups else None
        run_prepare(c, _with_saved(*handed.views(), solved), o, None, solved, *parting)
    _scan(c, handed, saved, o, final, segments, parting)


def _scan(
    c: Call, handed: Workspace | None, saved: Workspace | None, o: Tensor, final: Tensor,
    segments: SegmentedScan | None, parting: SequenceParts,
) -> None:  # fmt: skip
    """Launches the kernels that scan the states. While compiling, it launches all that calls of other sizes need."""
    kept = [] if saved is None else c.parts(saved)
    if handed is None:
        solved, factors, channels, residual = kept
        run_scan(c, channels, solved, factors, o, final, residual)
        return
    scans = _scans(c.p)
    if not scans and (c.every or segments is None):
        w = _with_saved(*handed.views(), *([] if saved is None else saved.views()))
        run_scan_channels(c, w, o, final, *parting)
    w = _with_saved(*c.parts(handed), *kept)
    channels = Channels(w.Qg, w.Kg, w.Kd, w.P, None, w.gamma, w.rates)
    given = c, channels, Solved(w.A, None, None), Factors(None, None, None), o, final
    if scans and (c.every or segments is None):
        run_scan(*given, None)
    run_segmented_scan(*given, segments)
