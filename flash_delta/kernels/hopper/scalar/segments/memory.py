"""The tensors that the kernels of a scan in segments pass to each other."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.hopper.scalar.segments.cut import Cut, count_starts, cut_prompts
from flash_delta.problem import Problem

HALF = 64  # value columns of a warp group


class SegmentedScan(NamedTuple):
    """How sequences are split, and the tensors that kernels pass to each other. If they are not split, it is only A."""

    length: int  # tokens of a segment; more than any sequence has if they are not split
    # [slots of chunks, HV, 3, C, C / 2] (device/inverse_tiles.py); saved for the backward pass, then without diag(b)
    A: Tensor
    B: Tensor | None  # transposed, [slots of segments, HV, V, K] float32
    Phi: Tensor | None  # transposed, in two parts, [slots of segments, HV, 2, K, K] bfloat16
    starts: Tensor | None  # [slots of segments, HV, V, K] float32


class PromptParts(NamedTuple):
    """How prompts on a pool are cut into parts, the list of these parts, and what finds the states that they start
    from. These states are behind those that programs hand over (plans/tape.py)."""

    cut: Cut
    starts: int  # how many parts there may be
    prompts: int  # how many prompts may be cut
    listed: Tensor  # plans/prompt_list.py
    A: Tensor | None  # as in SegmentedScan; without starts there is none, nor a Phi
    Phi: Tensor | None  # as in SegmentedScan, [starts, HV, 2, K, K]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self[3:] if t is not None)


class Maps(NamedTuple):
    """The tensors that the backward pass can take from the forward pass, if their segments are the same."""

    Phi: Tensor
    starts: Tensor


def new_maps(p: Problem, length: int) -> Tensor:
    """Memory for `Maps`, as a tensor of bytes."""
    return torch.empty(4 * count_slots(p, length) * p.HV * p.K * (p.K + p.V), dtype=torch.uint8, device=p.device)


def maps_in(p: Problem, length: int, memory: Tensor) -> Maps:
    """The maps in the ``memory`` of `new_maps`."""
    slots = count_slots(p, length)
    end = 4 * slots * p.HV * p.K * p.K
    Phi, starts = memory[:end].view(torch.bfloat16), memory[end:].view(torch.float32)
    return Maps(Phi.view(slots, p.HV, 2, p.K, p.K), starts.view(slots, p.HV, p.V, p.K))


def new_inverses(p: Problem) -> Tensor:
    """Memory for the A of all chunks."""
    return torch.empty(count_slots(p), p.HV, 3, C, C // 2, dtype=p.dtype, device=p.device)


def new_parts(p: Problem, processors: int, starts: int | None = None) -> PromptParts | None:
    """Memory for prompts in parts. None if no prompt of such heads is cut. ``starts``: by default as many as there may
    be in the call."""
    cut = cut_prompts(p, processors)
    if cut is None:
        return None
    starts, prompts = count_starts(p, cut) if starts is None else (starts, starts)
    numbers = -(-(2 + 5 * (p.N + starts)) // 64) * 64  # whole units of 256 bytes, as `run` rounds memory
    listed = torch.empty(numbers, dtype=torch.int32, device=p.device)
    if starts == 0:
        return PromptParts(cut, 0, 0, listed, None, None)
    Phi = torch.empty(starts, p.HV, 2, p.K, p.K, dtype=torch.bfloat16, device=p.device)
    return PromptParts(cut, starts, prompts, listed, new_inverses(p), Phi)


def new_segmented_scan(
    p: Problem, length: int | None, A: Tensor | None = None, maps: Tensor | None = None
) -> SegmentedScan:
    """Memory for a scan in segments of ``length`` tokens, or of whole sequences if it is None. ``A``, ``maps``: memory
    for these, if they are saved."""
    if A is None:
        A = new_inverses(p)
    if length is None:
        return SegmentedScan((p.T // C + 1) * C, A, None, None, None)
    Phi, starts = maps_in(p, length, new_maps(p, length) if maps is None else maps)
    return SegmentedScan(length, A, torch.empty_like(starts), Phi, starts)
