"""The backward pass with a decay per key channel: for which calls `chunk_back` computes the gradients of chunks."""

from typing import Any

import torch

from flash_delta.kernels.hopper.channel.backward.gradients import run_chunk_back
from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import Channels, DeepChunks, Residual, Solved, StateGradients
from flash_delta.problem import Inputs, Problem

LOWEST = -5.0  # nats: fifteen tokens fall by no more than MILD (blocks.py)


def unsupported(p: Problem) -> str | None:
    """Why `chunk_back` cannot compute the gradients of ``p``. None if it can."""
    if p.H != p.HV:
        return f"by hand they are found for as many key heads as value heads; there are {p.H} and {p.HV}"
    if p.gate.bound is not None and p.gate.bound < LOWEST:
        return f"by hand they are found with a lower_bound of {LOWEST:g} or more, it is {p.gate.bound:g}"
    if p.channel_strength and p.gate.dtype == torch.float32:
        return "by hand they are found with gates b and w if g is torch.bfloat16; it is torch.float32"
    return None


def find_gradients(c: Draft, memory: dict[type, Any], do: Layout, d: Inputs) -> None:
    """Launches `chunk_back`, and once more if chunks may be left."""
    groups = (Channels, Solved, Residual, StateGradients, DeepChunks)
    given = c, *(memory[group] for group in groups), do, d
    run_chunk_back(*given, rest=False)
    if c.p.gate.bound is None:
        run_chunk_back(*given, rest=True)
