"""Decides which kernels of the backward pass work on single chunks, before and after the scan of the states."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import HeadGradients, Scores, Workspace
from flash_delta.kernels.triton.backward.channel_gradients import run_channel_gradients
from flash_delta.kernels.triton.backward.gradients import run_gates, run_key_gradients, run_query_gradients
from flash_delta.kernels.triton.backward.halved_gradients import needs_halving, run_halved_gradients
from flash_delta.kernels.triton.backward.key_head_gradients import run_key_head_gradients
from flash_delta.kernels.triton.backward.pairs import run_pairs
from flash_delta.kernels.triton.forward.chunks import run_chunks
from flash_delta.problem import Inputs


class Chunks(NamedTuple):
    """The kernels of a backward pass that work on one chunk at a time, before and after the states are scanned."""

    name: str
    hands: tuple[type, ...]  # the groups of tensors that the kernels of ``find`` pass to each other
    prepare: Callable[[Call, tuple[Workspace, ...], bool], None]
    """Computes again what the scans need. It gets the call, its memory, and whether nothing was saved."""
    find: Callable[[Call, tuple[Workspace, ...], Inputs], None]
    """Gets the call, its memory, and where gradients go: of A_log and dt_bias as sums per chunk."""


def prepare_chunks(c: Call, memory: tuple[Workspace, ...], anew: bool) -> None:
    run_chunks(c, *c.parts(*memory)[:3], saved=not anew)


def find_gradients(c: Call, memory: tuple[Workspace, ...], d: Inputs) -> None:
    p, do, sums = c.p, c.more[0], (d.g, d.A_log, d.dt_bias)
    solved, factors, channels, residual, chain, scores, heads = c.parts(*memory)
    run_pairs(c, channels, solved, residual, chain, do, d, scores, heads)
    if p.gate.kind == "channel":
        if p.dtype == torch.bfloat16:
            run_channel_gradients(c, scores, heads, *sums)
        if needs_halving(p):
            run_halved_gradients(c, solved, residual, chain, do, scores, heads, *sums)
        run_key_head_gradients(c, solved, heads, d)
        return
    run_query_gradients(c, solved, factors, residual, do, d.q, scores)
    run_key_gradients(c, solved, factors, residual, chain, d, scores)
    if p.gate.kind == "scalar":
        run_gates(c, solved, scores, *sums)


CHUNKS = Chunks("triton", (Scores, HeadGradients), prepare_chunks, find_gradients)
