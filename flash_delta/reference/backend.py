"""The ``torch`` backend: everything, in plain PyTorch; whole sequences on any device, serving on the CPU."""

from flash_delta.problem import Problem
from flash_delta.reference.chunked import backward, forward
from flash_delta.reference.decode import decode
from flash_delta.reference.prefill import prefill
from flash_delta.reference.step import step

__all__ = ["backward", "decode", "forward", "prefill", "remark", "step", "unsupported"]


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.pool is not None and problem.device.type != "cpu":
        return f"it reads the indices of slots on the host, they are on {problem.device}"
    if problem.lengths is None:
        return f"it plans packed sequences on the host and cu_seqlens is on {problem.device}: give cu_seqlens_cpu too"
    return None


def remark(problem: Problem) -> str | None:
    """What else is to be said of how it runs ``problem``: nothing."""
    return None
