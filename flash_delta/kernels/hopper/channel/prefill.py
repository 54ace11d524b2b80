"""Prompts on a pool with a decay per channel: which calls come here, and what they launch."""

import torch
from torch import Tensor

from flash_delta.kernels.hopper.boxes import as_taken, describable, described
from flash_delta.kernels.hopper.channel.prompts import run_channel_prompts
from flash_delta.kernels.hopper.forward.prompt_list import run_list_prompts
from flash_delta.kernels.hopper.forward.rates import new_walks
from flash_delta.kernels.runtime.calls import Call, make_call, on
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.launch import run
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton.serving.decode import run_decode
from flash_delta.kernels.triton.serving.offsets import run_walk_to_offset
from flash_delta.kernels.triton.serving.prompts import convolved_bytes, new_convolved, run_after, run_before
from flash_delta.problem import Around, Inputs, KnownCall, Problem, Slots

PREFILL = ("prefill", "hopper", "channel")  # the kind of these calls
HEADS = 0.48  # per multiprocessor; with more heads, one prompt fills the chip
SEVERAL_HEADS = 0.24  # per multiprocessor; with more heads, several prompts of about the same length fill it


def slow(p: Problem, chip: Chip) -> str | None:
    """Why such calls are not faster than with ``triton``, or None. The result may depend on whether there can be
    several prompts, since `warmup` makes calls of both kinds. Only with ``batch_invariant`` it must not.

    Measured on an H100 with a bound (docs/notes/2026-11-25-kda-pools.md): with 64 heads this backend is 1.2x to 2.2x as
    fast. With 32 heads and several prompts of one length it is 2.2x as fast, but one long prompt takes 0.515 ms instead
    of 0.430. Without a bound, log decays may be so low that a chunk goes through the loop in four pieces. Then one long
    prompt takes 4 times as long.
    """
    if p.lower_bound is None:
        return "without a bound, low log decays would make it slower than `triton`"
    if chip.processors * HEADS <= p.HV:
        return None
    several = (p.N if p.max_prompts is None else min(p.N, p.max_prompts)) > 1
    if several and not p.batch_invariant and chip.processors * SEVERAL_HEADS <= p.HV:
        return None
    return f"{p.HV} heads are too few to keep the multiprocessors busy with one prompt"


def prefill(p: Problem, x: Inputs, s: Slots, around: Around, known: KnownCall | None = None) -> Tensor:
    """``o``, for calls with tokens and sequences. `decode` runs short sequences beside the others."""
    o, walks, convolved = triton.output_of(p, s), new_walks(p), new_convolved(p)

    def kernels(c: Call) -> None:
        rule = run_before(c, convolved)
        slots = Slots(*rule.more)
        if p.checkpoint_offsets:
            run_walk_to_offset(rule, slots, before=True)
        run_list_prompts(rule, o, walks, slots)
        run_channel_prompts(rule, o, walks, slots)
        if not p.batch_invariant:
            run_decode(rule, o)
        if p.checkpoint_offsets:
            run_walk_to_offset(rule, slots, before=False)
        run_after(c, o)

    with on(p.device):
        given = triton.with_flat_parameters(x._replace(g=described(x.g))) if p.taps else as_taken(x, "g")
        call = make_call(p, given, PREFILL, *s._replace(out=None), *around, known=known)
        run(call, kernels, o, spare=(walks, *convolved))
    triton.remember_served(call, x, known, PREFILL)
    return o


def workspace_bytes(p: Problem, x: Inputs) -> int:
    """As `backend.workspace_bytes`."""
    walks, copied = new_walks(p._replace(device=torch.device("meta"))), (x.g,) if p.taps else (*x[:3], x.g)
    return walks.nbytes + sum(t.nbytes for t in copied if not describable(t)) + convolved_bytes(p)
