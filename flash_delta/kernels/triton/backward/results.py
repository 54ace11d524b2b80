"""Memory for the gradients of a backward pass, and the sums over chunks of those of A_log and dt_bias."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.runtime.calls import Call
from flash_delta.kernels.runtime.launch import Kernels
from flash_delta.kernels.triton.elementwise.total import run_sum
from flash_delta.problem import Inputs, Problem


def gradients_of(x: Inputs, made: Iterable[Tensor | None]) -> Inputs:
    """The gradients, from the filled tensors of `new_gradients` or `summing`."""
    d = Inputs._make(made)
    if x.A_log is not None or x.dt_bias is not None:
        d = d._replace(A_log=summed(d.A_log, x.A_log), dt_bias=summed(d.dt_bias, x.dt_bias))
    return d


def summed(sums: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient of a parameter, from its float32 sums per head, or per chunk, head and channel."""
    if like is None:
        return None
    if sums.dim() == 1:
        return sums.view(like.shape).to(like.dtype)
    over = 0 if like.numel() == sums.shape[1:].numel() else (0, 2)
    return sums.sum(over).reshape(like.shape).to(like.dtype)


def summing(p: Problem, kernels: Kernels, d: Inputs) -> tuple[Kernels, Inputs, tuple[Tensor, ...]]:
    """``kernels`` that also sum the gradients of A_log and dt_bias over chunks, the gradients with these sums, and the
    parts. With a gate per channel PyTorch sums."""
    parts = {name: getattr(d, name) for name in ("A_log", "dt_bias") if getattr(d, name) is not None}
    if p.gate.kind == "channel" or not parts:
        return kernels, d, ()
    sums = {name: torch.empty(p.HV, dtype=torch.float32, device=p.device) for name in parts}

    def all_kernels(c: Call) -> None:
        kernels(c)
        for name, t in parts.items():
            run_sum(c, t, sums[name])

    return all_kernels, d._replace(**sums), tuple(parts.values())


def new_gradients(p: Problem, x: Inputs) -> Inputs:
    """Contiguous memory for the gradients, on the device of ``p``. For A_log and dt_bias it is for their sums per
    chunk, [slots, HV] or [slots, HV, K]."""
    d = Inputs(*(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=p.device) for t in x[:7]))
    sums = count_slots(p), p.HV, *((p.K,) if p.gate.kind == "channel" else ())
    new = partial(torch.empty, sums, dtype=torch.float32, device=p.device)
    return d._replace(**{name: new() for name in ("A_log", "dt_bias") if getattr(x, name) is not None})
