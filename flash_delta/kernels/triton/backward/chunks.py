"""Launches the kernels of the backward pass that work on single chunks after the scan of the states."""

from typing import Any

import torch

from flash_delta.kernels.runtime.calls import AnyCall
from flash_delta.kernels.runtime.workspace import (
    Channels,
    Factors,
    HeadGradients,
    Residual,
    Scores,
    Solved,
    StateGradients,
)
from flash_delta.kernels.triton.backward.channel_gradients import run_channel_gradients
from flash_delta.kernels.triton.backward.gradients import run_gates, run_key_gradients, run_query_gradients
from flash_delta.kernels.triton.backward.halved_gradients import needs_halving, run_halved_gradients
from flash_delta.kernels.triton.backward.key_head_gradients import run_key_head_gradients
from flash_delta.kernels.triton.backward.pairs import run_pairs
from flash_delta.problem import Inputs


def find_gradients(
    c: AnyCall, solved: Solved, factors: Factors, channels: Channels, residual: Residual, chain: StateGradients,
    scores: Scores, heads: HeadGradients, do: Any, d: Inputs,
) -> None:  # fmt: skip
    """``d``: where gradients go; those of A_log and dt_bias for every chunk."""
    p, sums = c.p, (d.g, d.A_log, d.dt_bias)
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
