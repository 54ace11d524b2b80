"""Plans the backward pass of the chunkwise rule."""

from collections.abc import Callable
from typing import Any

import torch

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime.arguments import draft_of
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import EVERY, Making, Plan
from flash_delta.kernels.runtime.workspace import (
    Residual,
    StateGradients,
    groups_in,
    make_groups,
)
from flash_delta.kernels.triton.backward.chunks import CHUNKS, Chunks, Groups
from flash_delta.kernels.triton.backward.results import OutputGradients, Saved
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.backward.segments import new_segmented_back, run_segmented_back
from flash_delta.kernels.triton.elementwise.total import sum_parts
from flash_delta.kernels.triton.forward.plan import HANDED, saved_groups
from flash_delta.kernels.triton.tiles import Segments
from flash_delta.problem import Inputs, Problem


def plan_backward(
    p: Problem, chip: Chip, x: Inputs, after: OutputGradients, given: Saved, *, choice: Segments | None = None,
    chunks: Chunks = CHUNKS, made: Making | None = None,
) -> Plan:  # fmt: skip
    """The gradients of all inputs but the bounds. Those of A_log and dt_bias are float32: sums per head, or with a
    decay per channel for every chunk, [slots, HV, K]. ``choice``: how sequences are split; None: they are not.
    ``made``: copies of ``x`` and ``after``."""
    c, memory = draft_of(p, chip, x, choice, made), Groups()
    d, parts = make_gradients(c.made, p, x)
    if given.saved is not None:
        memory |= zip(saved_groups(p), groups_in(given.saved, p, *saved_groups(p)), strict=True)
    saved, recompute = bool(memory), Residual not in memory
    own = [group for group in (*HANDED, Residual, StateGradients, *chunks.hands) if group not in memory]
    memory |= zip(own, make_groups(c.made, p, *own), strict=True)
    solved, factors, channels, residual, chain = (memory[g] for g in (*HANDED, Residual, StateGradients))
    # Without it only maps of segments read values, and nobody reads what they make of them.
    scans = chunks.prepare(c, memory, saved) if recompute else c
    operands = (scans, channels, solved, factors, residual, after.do, after.dfinal, chain, d.initial_state)
    if choice is None or c.every:
        run_scan_backward(*operands, recompute=recompute)
    split = new_segmented_back(p, None if c.every else choice, c.made)
    run_segmented_back(*operands, split, recompute=recompute)
    chunks.find(c, memory, after.do, d._replace(**parts))
    for name, t in parts.items():
        c.steps.append(sum_parts(t, getattr(d, name)))
    return c.plan(*(d if p.channel_strength else d[:9]))


def plan_usual_backward(
    p: Problem, chip: Chip, x: Inputs, plan: Callable[..., Plan] = plan_backward, kept: Callable[[Any], Any] = Saved,
    saved_bytes: int | None = None, choice: Any = EVERY,
) -> Plan:  # fmt: skip
    """The backward pass of most calls: nobody uses the final states, and the gradient of o has no gaps. ``plan``,
    ``kept``: of the backend, whose forward pass saves so many bytes. By default for all sizes, and then it is never
    run, but compiled together with the forward pass."""
    outer = Making()
    do = outer.new("do", p.o_shape, p.dtype)
    saved = None if saved_bytes is None else outer.new("saved", (saved_bytes,), torch.uint8)
    found = plan(p, chip, x, OutputGradients(do, None), kept(saved), choice=choice)
    return found._replace(memory=(*found.memory, *outer))


def make_gradients(made: Making, p: Problem, x: Inputs) -> tuple[Inputs, dict[str, Any]]:
    """Contiguous memory for the gradients. With a decay per head the second result is memory for those of A_log and
    dt_bias of every chunk [slots, 1, HV], which a launch sums. With one per channel PyTorch sums."""
    d = Inputs(*(made.like(f"d{name}", t) for name, t in zip(x._fields[:7], x, strict=False)))
    if p.channel_strength:
        d = d._replace(b=made.like("db", x.b), w=made.like("dw", x.w))
    channel, slots, parts, sums = p.gate.kind == "channel", count_slots(p), {}, {}
    for name in ("A_log", "dt_bias"):
        if getattr(x, name) is not None:
            sums[name] = made.new(f"d{name}", (slots, p.HV, p.K) if channel else (p.HV,), torch.float32)
            if not channel:
                parts[name] = made.new(f"parts of d{name}", (slots, 1, p.HV), torch.float32)
    return d._replace(**sums), parts
