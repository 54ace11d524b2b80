"""Copies the states of a single prompt between the pool and separate tensors, if the prompt is walked in segments. The
kernels of such a walk use the pool only for checkpoints."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_delta.kernels.device.chunk import bounds, follow
from flash_delta.kernels.hopper.forward.prompt_list import find_slots
from flash_delta.kernels.hopper.segments.memory import Walk, new_walk
from flash_delta.kernels.hopper.segments.run import run_walk
from flash_delta.kernels.hopper.tiles import HAND_OVER
from flash_delta.kernels.runtime.arguments import launch_rule, table
from flash_delta.kernels.runtime.calls import Call
from flash_delta.problem import Problem, Slots

NUMBERS = ["T", "slots", "null_slot", "slot_stride", "read_row", "write_row", "has_row"]
INDICES = ["read_indices", "write_indices", "has_initial_state"]  # as in `decode`


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=INDICES)
def hand_over(
    pool, states, span, cu_seqlens, read_indices, write_indices, has_initial_state, T, slots, null_slot, slot_stride,
    read_row, write_row, has_row, SHORT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copies the prompt's first state to ``states`` in float32, and writes the bounds of the walk to ``span``. The walk
    is empty if `decode` runs the prompt or if it is padding. With BACK, copies the last state from ``states`` to the
    pool. Grid (numbers in a slot / BLOCK)."""
    tables = (read_indices, write_indices, has_initial_state, read_row, write_row, has_row)
    first, last, well = find_slots(tables, tl.program_id(0) * 0, (slots, null_slot))
    start, stop, _ = bounds(tl.program_id(0) * 0, cu_seqlens, 1, T, 1, True)
    well = well & (stop - start > SHORT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BACK:
        follow(OVERLAP)
        S = tl.load(states + i)
        tl.store(pool + last.to(tl.int64) * slot_stride + i, S.to(pool.dtype.element_ty), mask=well & (last >= 0))
    else:
        S = tl.load(pool + first.to(tl.int64) * slot_stride + i, mask=well & (first >= 0), other=0.0)
        tl.store(states + i, S.to(tl.float32))
        if tl.program_id(0) == 0:
            tl.store(span, start)
            tl.store(span + 1, tl.where(well, stop, start))


class Prompt(NamedTuple):
    """A prompt that is walked in segments, with tensors instead of slots."""

    walk: Walk
    first: Tensor  # the state that it starts from: float32, with the axes of the pool
    last: Tensor  # the state that it ends with
    span: Tensor  # its bounds, like ``cu_seqlens``; 64 numbers, which is a whole line of memory


def new_prompt(p: Problem, length: int | None) -> Prompt | None:
    """Memory for a prompt. ``length``: that of its segments, or None if it is not split."""
    if length is None:
        return None
    states = (torch.empty(1, *p.state_shape[1:], dtype=torch.float32, device=p.device) for _ in range(2))
    return Prompt(new_walk(p._replace(N=1), length), *states, torch.empty(64, dtype=torch.int32, device=p.device))


def run_prompt(c: Call, o: Tensor, rates: Tensor, prompt: Prompt, slots: Slots) -> None:
    """Walks the prompt in segments. `run_hand_over` comes before it, and with ``back`` after it."""
    x = c.x._replace(initial_state=prompt.first, cu_seqlens=prompt.span)
    run_walk(c._replace(p=c.p._replace(N=1), x=x), o, prompt.last, rates, prompt.walk, slots=slots)


def run_hand_over(c: Call, prompt: Prompt, slots: Slots, *, back: bool) -> None:
    p, pool = c.p, slots.state_pool
    tables = (slots.read_indices, slots.write_indices, slots.has_initial_state)
    pointers = (pool, prompt.last if back else prompt.first, prompt.span, c.x.cu_seqlens, *tables)
    launch_rule(
        c, hand_over, pointers, (p.HV * p.K * p.V // HAND_OVER.BV, 1, 1), HAND_OVER,
        p.T, len(pool), p.null_slot, pool.stride(0), *(table(t)[0] for t in tables), BACK=back,
        BLOCK=HAND_OVER.BV, follows=back,
    )  # fmt: skip
