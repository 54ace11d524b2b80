"""The ``torch`` backend: every member in plain PyTorch. It runs whole sequences on any device, and serves on the
CPU."""

import torch

from flash_delta.problem import Problem
from flash_delta.reference.alone import backward, forward
from flash_delta.reference.decode import decode
from flash_delta.reference.prefill import prefill
from flash_delta.reference.ring import commit
from flash_delta.reference.step import step

__all__ = [
    "backward",
    "commit",
    "decode",
    "forward",
    "plans_on_host",
    "preference",
    "prefill",
    "remark",
    "step",
    "unsupported",
]

plans_on_host = True


def unsupported(problem: Problem) -> str | None:
    """Why this backend cannot run ``problem``; None if it can."""
    if problem.pools is not None and problem.device.type != "cpu":
        return f"it reads the indices of slots on the host, but they are on {problem.device}"
    if problem.gate.kind == "channel" and problem.erase == "undecayed":
        return "with a decay per channel it erases from the decayed state"
    if problem.channel_strength and (problem.gate.kind != "channel" or problem.erase is None or problem.erase_keys):
        return "with a strength per channel (b, w) it takes a decay per channel, and erases what it writes"
    if problem.erase is None and problem.erase_keys:
        return "it has no use for erase keys (p) in a rule that erases nothing"
    if problem.pools is not None and not problem.decodable:
        return "on a pool it runs Gated DeltaNet, GDN-2 and Kimi Delta Attention only"
    if problem.lengths is None and (problem.dtype != torch.float64 or problem.device.type == "meta"):
        return f"it plans packed sequences on the host, but cu_seqlens is on {problem.device}: give cu_seqlens_cpu too"
    return None


def preference(problem: Problem) -> tuple[int, str | None]:
    """First on a CPU, last elsewhere."""
    return -1, None


def remark(problem: Problem) -> str | None:
    if problem.lengths is None:
        return "it waits for the device once, to read cu_seqlens, unless cu_seqlens_cpu is given too"
    return None
