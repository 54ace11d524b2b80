"""The kernels of the backward pass that work on single chunks, before and after the scans of the states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flash_delta.kernels.runtime.plan import Draft, Layout
from flash_delta.kernels.runtime.workspace import (
    HeadGradients,
    Residual,
    Scores,
    StateGradients,
)
from flash_delta.kernels.triton.backward.channel_gradients import run_channel_gradients
from flash_delta.kernels.triton.backward.gradients import run_gates, run_key_gradients, run_query_gradients
from flash_delta.kernels.triton.backward.halved_gradients import needs_halving, run_halved_gradients
from flash_delta.kernels.triton.backward.key_head_gradients import run_key_head_gradients
from flash_delta.kernels.triton.backward.pairs import run_pairs
from flash_delta.kernels.triton.forward.plan import HANDED, run_chunks
from flash_delta.problem import Inputs

Groups = dict[type, Any]  # memory by the type of its named tuple


class Chunks(NamedTuple):
    """What a backward pass launches before and after the scans."""

    hands: tuple[type, ...]  # the groups of tensors that the kernels of ``find`` pass to each other
    prepare: Callable[[Draft, Groups, bool], Draft]
    """Computes again what the scans need, except w . v, and returns their draft. It also gets whether what `solve`
    writes was saved."""
    find: Callable[[Draft, Groups, Layout, Inputs], None]
    """Gets do, and where gradients go: of A_log and dt_bias for every chunk."""


def prepare_again(c: Draft, memory: Groups, saved: bool) -> Draft:
    return run_chunks(c, *(memory[group] for group in HANDED), saved=saved, valued=False)


def find_gradients(c: Draft, memory: Groups, do: Layout, d: Inputs) -> None:
    groups, p, sums = (*HANDED, Residual, StateGradients, Scores, HeadGradients), c.p, (d.g, d.A_log, d.dt_bias)
    solved, factors, channels, residual, chain, scores, heads = (memory[group] for group in groups)
    run_pairs(c, channels, solved, residual, chain, do, d, scores, heads)
    if p.gate.kind == "channel":
        if p.dtype == torch.bfloat16:
            run_channel_gradients(c, scores, heads, d)
        if needs_halving(p):
            run_halved_gradients(c, solved, residual, chain, do, scores, heads, d)
        run_key_head_gradients(c, solved, heads, d)
        return
    run_query_gradients(c, solved, factors, residual, do, d.q, scores)
    run_key_gradients(c, solved, factors, residual, chain, d, scores)
    if p.gate.kind == "scalar":
        run_gates(c, solved, scores, *sums)


CHUNKS = Chunks((Scores, HeadGradients), prepare_again, find_gradients)
