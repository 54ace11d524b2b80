"""When this backend goes first, where it can run at all. Needs no Triton."""

from functools import lru_cache

import torch

from flash_delta.problem import Problem

HEADS = 0.2  # of 64 numbers, per multiprocessor: from there on its programs keep the card busy
PROMPT_HEADS = 0.18  # the same of prompts on a pool, of which few are split


def hesitation(p: Problem) -> str | None:
    """Why this backend should not go first; None if it should. No length and no number of sequences may change that:
    the other backend would have to be compiled in the middle of the work.

    As measured on an H200 with 132 multiprocessors (docs/notes): heads of 128 and 256 are ahead of ``triton`` but for
    one sequence of some 2,000 tokens on few heads, and those of 64, not split, from 32 states on; segments of those
    were not measured. On a pool it walks half a state's chunk in 1.73 us, for which ``triton`` takes 1.23 with 16 heads
    and 1.80 with 24.
    """
    if p.device.type != "cuda" or not all(isinstance(size, int) for size in (p.HV, p.K)):
        return "its multiprocessors or the heads are not known"  # while torch.compile traces, or on "meta"
    if p.K == 64 and HEADS * _processors(p.device.index) > p.HV:
        return f"{p.HV} heads of 64 are too few to keep the multiprocessors busy with one walk each"
    if p.pool is not None and PROMPT_HEADS * _processors(p.device.index) > p.HV:
        return f"{p.HV} heads are too few to keep the multiprocessors busy, and few prompts are split"
    return None


@lru_cache
def _processors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
