"""Plans the backward pass of the chunkwise rule."""

from typing import Any, NamedTuple

import torch

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Making, Plan
from flash_delta.kernels.runtime.workspace import (
    HeadGradients,
    Residual,
    Scores,
    StateGradients,
    groups_in,
    make_groups,
)
from flash_delta.kernels.triton.backward.chunks import find_gradients
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.backward.segments import new_segmented_back, run_segmented_back
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.kernels.triton.forward.chunks import run_chunks
from flash_delta.kernels.triton.forward.plan import HANDED, saved_groups
from flash_delta.kernels.triton.tiles import Segments
from flash_delta.problem import Inputs, Problem


class OutputGradients(NamedTuple):
    """The gradients of a call's results."""

    do: Any
    dfinal: Any


class Saved(NamedTuple):
    """What the forward pass has saved; None: nothing, so everything is computed again."""

    saved: Any


def plan_backward(
    p: Problem, chip: Chip, x: Inputs, after: OutputGradients, given: Saved, *, choice: Segments | None = None
) -> Plan:  # fmt: skip
    """The gradients of all inputs but the bounds. Those of A_log and dt_bias are float32: sums per head, or with a
    decay per channel for every chunk, [slots, HV, K]. ``choice``: how sequences are split; None: they are not."""
    c, saved = draft_of(p, chip, x, choice), {}
    d, parts = make_gradients(c.made, p, x)
    if given.saved is not None:
        saved = dict(zip(saved_groups(p), groups_in(given.saved, p, *saved_groups(p)), strict=True))
    own = [group for group in (*HANDED, Residual, StateGradients, Scores, HeadGradients) if group not in saved]
    groups = saved | dict(zip(own, make_groups(c.made, p, *own), strict=True))
    solved, factors, channels, residual, chain = (groups[g] for g in (*HANDED, Residual, StateGradients))
    recompute = Residual not in saved
    if recompute:
        run_chunks(c, solved, factors, channels, saved=bool(saved))
    operands = (c, channels, solved, factors, residual, after.do, after.dfinal, chain, d.initial_state)
    if choice is None or c.every:
        run_scan_backward(*operands, recompute=recompute)
    split = new_segmented_back(p, None if c.every else choice, c.made)
    run_segmented_back(*operands, split, recompute=recompute)
    scores, heads, of_chunks = groups[Scores], groups[HeadGradients], d._replace(**parts)
    find_gradients(c, solved, factors, channels, residual, chain, scores, heads, after.do, of_chunks)
    for name, t in parts.items():
        c.steps.append(sum_parts(t, getattr(d, name)))
    return c.plan(*d[:9])


def make_gradients(made: Making, p: Problem, x: Inputs) -> tuple[Inputs, dict[str, Any]]:
    """Contiguous memory for the gradients. With a decay per head the second result is memory for those of A_log and
    dt_bias of every chunk [slots, 1, HV], which a launch sums. With one per channel PyTorch sums."""
    d = Inputs(*(made.like(f"d{name}", t) for name, t in zip(x._fields[:7], x, strict=False)))
    channel, slots, parts, sums = p.gate.kind == "channel", count_slots(p), {}, {}
    for name in ("A_log", "dt_bias"):
        if getattr(x, name) is not None:
            sums[name] = made.new(f"d{name}", (slots, p.HV, p.K) if channel else (p.HV,), torch.float32)
            if not channel:
                parts[name] = made.new(f"parts of d{name}", (slots, 1, p.HV), torch.float32)
    return d._replace(**sums), parts
