"""The tensors that the kernels of a scan in segments pass to each other."""

from typing import NamedTuple

import torch

from flash_delta.kernels.device.chunk import C, count_slots
from flash_delta.kernels.hopper.scalar.segments.cut import Cut, count_starts, cut_prompts
from flash_delta.kernels.runtime.plan import Layout, Making, part_of
from flash_delta.problem import Problem

HALF = 64  # value columns of a warp group


class SegmentedScan(NamedTuple):
    """How sequences are split, and the tensors that kernels pass to each other. If they are not split, it is only A."""

    length: int  # tokens of a segment; more than any sequence has if they are not split
    # [slots of chunks, HV, 3, C, C / 2] (device/inverse_tiles.py); saved for the backward pass, then without diag(b)
    A: Layout
    B: Layout | None  # transposed, [slots of segments, HV, V, K] float32
    Phi: Layout | None  # transposed, in two parts, [slots of segments, HV, 2, K, K] bfloat16
    starts: Layout | None  # [slots of segments, HV, V, K] float32


class PromptParts(NamedTuple):
    """How prompts on a pool are cut into parts, the list of these parts, and what finds the states that they start
    from. These states are behind those that programs hand over (plans/tape.py)."""

    cut: Cut
    starts: int  # how many parts there may be
    prompts: int  # how many prompts may be cut
    listed: Layout  # plans/prompt_list.py
    A: Layout | None  # as in SegmentedScan; without starts there is none, nor a Phi
    Phi: Layout | None  # as in SegmentedScan, [starts, HV, 2, K, K]


class Maps(NamedTuple):
    """The tensors that the backward pass can take from the forward pass, if their segments are the same."""

    Phi: Layout
    starts: Layout


def new_maps(made: Making, p: Problem, length: int) -> Layout:
    """Memory for `Maps`, as a tensor of bytes."""
    return made.new("maps", (4 * count_slots(p, length) * p.HV * p.K * (p.K + p.V),), torch.uint8)


def maps_in(p: Problem, length: int, memory: Layout) -> Maps:
    """The maps in the ``memory`` of `new_maps`."""
    slots = count_slots(p, length)
    Phi = part_of(memory, 0, (slots, p.HV, 2, p.K, p.K), torch.bfloat16)
    return Maps(Phi, part_of(memory, 2 * Phi.numel(), (slots, p.HV, p.V, p.K), torch.float32))


def new_inverses(made: Making, p: Problem) -> Layout:
    """Memory for the A of all chunks."""
    return made.new("A", (count_slots(p), p.HV, 3, C, C // 2), p.dtype)


def new_parts(made: Making, p: Problem, processors: int, starts: int | None = None) -> PromptParts | None:
    """Memory for prompts in parts. None if no prompt of such heads is cut. ``starts``: by default as many as there may
    be in the call."""
    cut = cut_prompts(p, processors)
    if cut is None:
        return None
    starts, prompts = count_starts(p, cut) if starts is None else (starts, starts)
    listed = made.new("parts", (2 + 5 * (p.N + starts),), torch.int32)
    if starts == 0:
        return PromptParts(cut, 0, 0, listed, None, None)
    Phi = made.new("Phi", (starts, p.HV, 2, p.K, p.K), torch.bfloat16)
    return PromptParts(cut, starts, prompts, listed, new_inverses(made, p), Phi)


def new_segmented_scan(
    made: Making, p: Problem, length: int | None, A: Layout | None = None, maps: Layout | None = None
) -> SegmentedScan:
    """Memory for a scan in segments of ``length`` tokens, or of whole sequences if it is None. ``A``, ``maps``: memory
    for these, if they are saved."""
    if A is None:
        A = new_inverses(made, p)
    if length is None:
        return SegmentedScan((p.T // C + 1) * C, A, None, None, None)
    Phi, starts = maps_in(p, length, new_maps(made, p, length) if maps is None else maps)
    return SegmentedScan(length, A, made.like("B", starts), Phi, starts)
