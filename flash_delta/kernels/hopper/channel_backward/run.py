"""The backward pass with a decay per key channel: which calls it runs. The states and their gradients are walked by
``triton``; what is left is `chunk_back`."""

import torch
from torch import Tensor

from flash_delta.kernels.hopper.boxes import described
from flash_delta.kernels.hopper.channel_backward.gradients import run_chunk_back
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.workspace import Workspace
from flash_delta.kernels.triton import backend as triton
from flash_delta.problem import Inputs, KnownCall, Problem

LOWEST = -5.0  # nats: what fifteen tokens fall by is no more than MILD (blocks.py)


def unsupported(p: Problem) -> str | None:
    """Why it cannot run ``p``, a problem with a decay per channel and gradients."""
    if p.dtype != torch.bfloat16 or (p.K, p.V) != (128, 128):
        return f"with a decay per channel it trains heads of 128 in bfloat16; they are {p.K} and {p.V} in {p.dtype}"
    if p.H != p.HV:
        return f"with a decay per channel it trains as many key heads as value heads; they are {p.H} and {p.HV}"
    if p.lower_bound is not None and p.lower_bound < LOWEST:
        return f"with a decay per channel it trains with a lower_bound of {LOWEST:g} or more, it is {p.lower_bound:g}"
    return None


def remark(p: Problem) -> str:
    return "'triton' runs the forward pass and walks the states; gradients of a chunk are found by hand"


def find(c: Call, memory: tuple[Workspace, ...], d: Inputs, dA_log: Tensor | None, ddt_bias: Tensor | None) -> None:
    solved, _, channels, residual, chain = (group for w in memory for group in w.views())
    run_chunk_back(c, channels, solved, residual, chain, c.more[0], d, dA_log, ddt_bias)


FINDER = triton.Finder("hopper", (), find)


def backward(
    p: Problem, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dfinal: Tensor | None, known: KnownCall | None = None
) -> Inputs:
    """As `backward` of a backend. Without tokens ``triton`` runs it."""
    if p.N * p.T == 0:
        return triton.backward(p, x, saved, do, dfinal, known)
    x = x._replace(**{name: described(getattr(x, name)) for name in ("q", "k", "g")})
    return triton.backward_by(FINDER, p, x, saved, described(do), dfinal, known)
