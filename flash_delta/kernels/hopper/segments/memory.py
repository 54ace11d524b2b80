"""The tensors by which the kernels of a walk in segments hand each other their results."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.problem import Problem

HALF = 64  # value columns of a warp group


class Walk(NamedTuple):
    """How sequences are split, and what the kernels hand each other: only A if sequences are not split."""

    length: int  # tokens of a segment; more than any sequence has if they are not split
    A: Tensor  # [slots of chunks, HV, C, C]; saved for the backward pass, and then without diag(b)
    B: Tensor | None  # transposed, [slots of segments, HV, V, K] float32
    Phi: Tensor | None  # transposed, in two parts, [slots of segments, HV, 2, K, K] bfloat16
    starts: Tensor | None  # [slots of segments, HV, V, K] float32


def new_walk(p: Problem, length: int, A: Tensor | None = None) -> Walk:
    segments, A = count_slots(p, length), new_inverses(p) if A is None else A
    B, starts = (torch.empty(segments, p.HV, p.V, p.K, dtype=torch.float32, device=p.device) for _ in range(2))
    return Walk(length, A, B, torch.empty(segments, p.HV, 2, p.K, p.K, dtype=torch.bfloat16, device=p.device), starts)


def new_whole_walk(p: Problem, A: Tensor | None = None) -> Walk:
    return Walk((p.T // C + 1) * C, new_inverses(p) if A is None else A, None, None, None)


def new_inverses(p: Problem) -> Tensor:
    return torch.empty(count_slots(p), p.HV, C, C, dtype=p.dtype, device=p.device)
