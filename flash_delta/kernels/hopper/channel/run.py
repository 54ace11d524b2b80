"""The forward pass with a decay per key channel: which calls it runs, and its launches."""

import torch
from torch import Tensor

from flash_delta.kernels.hopper.boxes import described
from flash_delta.kernels.hopper.channel.prepare import run_prepare
from flash_delta.kernels.hopper.channel.walk import run_walk_channels
from flash_delta.kernels.hopper.tiles import walks_by_hand
from flash_delta.kernels.runtime.arguments import every
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.launch import remember, replayed, run
from flash_delta.kernels.runtime.workspace import Channels, Factors, Prepared, Solved, Workspace
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton.forward.scan import run_scan
from flash_delta.kernels.triton.forward.segments import SegmentedScan, new_segmented_scan, run_segmented_scan
from flash_delta.kernels.triton.tiles import plan_segments
from flash_delta.problem import Inputs, KnownCall, Outputs, Problem

FORWARD = ("hopper", "channel")  # the kind of these calls


def unsupported(p: Problem) -> str | None:
    """Why it cannot run ``p``, a problem with a decay per channel."""
    if p.needs_grad:
        return "with a decay per channel it runs calls without gradients"
    if p.pool is not None:
        return "with a decay per channel it runs no prompts on a pool"
    if p.dtype != torch.bfloat16 or (p.K, p.V) != (128, 128):
        return f"with a decay per channel it runs heads of 128 in bfloat16; they are {p.K} and {p.V} in {p.dtype}"
    return None


def remark(p: Problem) -> str:
    chip = chip_of(p.device)
    split = plan_segments(p, chip)
    if split is not None:
        walk = f"'triton' walks sequences in segments of {split.length} tokens"
    else:
        walk = "it walks half a state per program" if walks_by_hand(p, chip) else "'triton' walks the states"
    return f"{walk}; 'triton' runs all of it if g is of another dtype than q"


def forward(p: Problem, x: Inputs, known: KnownCall | None = None) -> Outputs:
    """With tokens and sequences. What gates of other types than bfloat16 need is left to ``triton``."""
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=p.device)
    final = torch.empty(*p.state_shape, dtype=torch.float32, device=p.device)
    split = plan_segments(p, chip_of(p.device))
    if replayed(known, (*FORWARD, split), x, (o, final)):
        return Outputs(o, final)
    memory, segments = Workspace(p, Prepared), new_segmented_scan(p, split)

    def kernels(c: Call) -> None:
        run_prepare(c, memory.views()[0], o)
        _walk(c, memory, o, final, segments)

    with on(p.device):
        given = triton.with_flat_parameters(x)
        given = given._replace(**{name: described(getattr(x, name)) for name in ("q", "k", "v", "g")})
        if x.initial_state is not None:
            given = given._replace(initial_state=x.initial_state.float().contiguous())
        call = make_call(p, given, FORWARD, known=known, name=(*FORWARD, split))
        run(call, kernels, o, final, spare=(memory.buffer, *(segments or ())[1:]))
    remember(call, x)
    return Outputs(o, final)


def _walk(c: Call, memory: Workspace, o: Tensor, final: Tensor, segments: SegmentedScan | None) -> None:
    """Launches what walks the states; while compiling, all that a call of other sizes may launch."""
    by_hand = walks_by_hand(c.p, c.shape.chip)
    if every(c) or (segments is None and by_hand):
        run_walk_channels(c, memory.views()[0], o, final)
    (w,) = c.parts(memory)
    channels = Channels(w.Qg, w.Kg, w.Kd, w.P, None, w.gamma, w.rates)
    given = c, channels, Solved(w.A, None, None), Factors(None, None, None), o, final
    if every(c) or (segments is None and not by_hand):
        run_scan(*given, None)
    run_segmented_scan(*given, segments)
