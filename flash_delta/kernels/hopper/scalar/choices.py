"""What a call with one decay per value head runs by hand, and how its sequences are split: what is known without its
kernels."""

import torch

from flash_delta.kernels.hopper.plans.padding import WIDTHS, padded, pads
from flash_delta.kernels.hopper.plans.splits import split_length
from flash_delta.kernels.hopper.scalar.segments.cut import cut_prompts
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.workspace import ForBackward, Trace, count_bytes
from flash_delta.problem import Problem


def lists(p: Problem, chip: Chip) -> bool:
    """Whether the device lists the sequences of a forward pass without a pool, and cuts long ones, since it alone knows
    their lengths. The host plans for one sequence, which has at most T tokens. With ``batch_invariant`` none is cut,
    because a sequence without bounds is not cut either."""
    if not p.packed or p.N < 2 or p.lengths is not None or p.needs_grad or p.batch_invariant:
        return False
    wide = padded(p)
    return wide.K <= 128 and cut_prompts(wide, chip.processors) is not None


def unsupported_back(p: Problem) -> str | None:
    """Why ``triton`` runs the backward pass of ``p``, whose forward pass this backend runs. None if it does not."""
    if p.dtype != torch.bfloat16:
        return f"U is divided by b, for which {p.dtype} has too few exponents"
    if not pads(p) and (p.K not in WIDTHS or p.V != p.K):
        return f"K and V have to be 64 or 128, both; they are {p.K} and {p.V}"
    return None


def goes_back(p: Problem) -> bool:
    """Whether this backward pass runs."""
    return p.needs_grad and unsupported_back(p) is None


def saved_groups(p: Problem) -> tuple[type, ...]:
    """What the forward pass saves for this backward pass. With ``disable_recompute`` also states and U of chunks."""
    return (ForBackward, Trace) if p.disable_recompute else (ForBackward,)


def segment_length(p: Problem, chip: Chip) -> int | None:
    """Tokens of a segment, in both passes if the backward pass is by hand. None if sequences are not split."""
    return split_length(p, chip.processors, back=goes_back(p))


def saved_bytes(p: Problem) -> int | None:
    """How many bytes the forward pass saves. None if `triton` runs the backward pass."""
    wide = padded(p)
    return count_bytes(wide, *saved_groups(wide)) if goes_back(wide) else None
