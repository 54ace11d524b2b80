"""The facts about a launch for a profiler: the kernel's sizes, operations and bytes.

Triton asks for them if a hook watches launches, as Proton's hook does. Then known calls also go through Triton's
launcher (`launch.profiled`). Without such a hook nothing here runs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C

SIZES = ("N", "T", "M", "H", "HV", "K", "V", "WIDTH", "D", "W")  # arguments that are shown in a launch's name
STATES = {  # how often the states of a sequence are moved; 0: inputs that are read only for windows
    "pool": 2, "conv_pool": 2, "conv_target": 1, "windows": 1, "initial": 1, "initial_state": 1, "final": 1,
    "final_state": 1, "inputs_q": 0, "inputs_k": 0, "inputs_v": 0,
}  # fmt: skip


def _scan(erase: bool, output: bool, solved: bool) -> dict[str, float]:
    """The products of a scan. ``solved``: the loop computes U from R."""
    return {"CCV": output + (erase and solved), "CKV": 1 + erase + output}


def _scan_or_maps(a: Any) -> dict[str, float]:
    """The products of `scan` or of maps. A segment's map has K more columns than a state (segments.py)."""
    found = _scan(a.ERASE, a.OUTPUT, a.SAVE or a.CHANNEL)
    maps = {"CCK": found["CCV"], "CKK": found["CKV"]} if a.SEGMENTS and not a.OUTPUT else {}
    return found | maps


def _scan_backward(a: Any) -> dict[str, float]:
    again = _scan(a.ERASE, False, True) if a.RECOMPUTE else {"CCV": 0, "CKV": 0}
    return {"CCV": 1 + a.CHANNEL + again["CCV"], "CKV": 2 + a.ERASE + again["CKV"]}


def _pairs(a: Any) -> dict[str, float]:
    """The products of `pairs`. Sums over pairs of tokens are products with ones, once for each part of a number."""
    scores = 0 if a.CHANNEL else a.GATE + (a.ERASE and (a.GATE or a.HAS_BETA))
    sums = a.GATE * (1 + a.UNDECAYED) * (3 if a.k.dtype == torch.float32 else 2)
    return {"CCK": scores, "CCV": 1 + a.ERASE, "CCC": sums, "CKV": 3 * a.STATES}


def _halved(a: Any) -> dict[str, float]:
    """The products of `halved_gradients`. In bfloat16 it runs only on chunks with strong gates, which the host cannot
    count."""
    return {} if a.k.dtype == torch.bfloat16 else {"CCK": 33.5, "CKV": 3}


def _scan_segments(a: Any) -> dict[str, float]:
    """The products of `scan_segments`. Without q only erase keys read the state."""
    reads = a.q_desc is not None
    return {"CCK": reads * a.WIDTH / (64 * a.GROUPS), "CCV": 1 + reads, "CKV": 2 + reads}


def _scan_gradients(a: Any) -> dict[str, float]:
    """The products of `scan_gradients`. A segment's map needs only the gradient of its state. Sums over pairs are
    products with ones, in two parts."""
    if not a.GRADIENTS:
        return {"CCK": 1, "CCV": 2, "CKV": 3}
    return {"CCK": 6, "CCV": 4, "CKV": 6, "CCC": 2 * a.GATE}


# How many matrix products a kernel runs per chunk and value head, by size: 2 of C x K x V are {"CKV": 2}. The keys are
# kernels. A function takes the kernel's arguments by name. Kernels that are absent run no products.
PRODUCTS: dict[str, Callable[[Any], dict[str, float]]] = {
    "solve": lambda a: {"CCK": 0 if a.CHANNEL else 0.625 * a.H / a.HV, "CCC": 57 / 64} if a.ERASE else {},
    "channel": lambda _: {"CCK": 1.25},
    "factor": lambda a: {"CCK": a.H / a.HV + a.ERASE, "CCC": a.ERASE},
    "scan": _scan_or_maps,
    "compose": lambda a: {"KKV": C / a.length},
    "decode": lambda _: {"CKV": 3},
    "scan_backward": _scan_backward,
    "pairs": _pairs,
    "query_gradients": lambda _: {"CCK": 1, "CKV": 1},
    "key_gradients": lambda a: {"CCK": 1 + 2 * a.ERASE, "CKV": 1 + a.ERASE + a.GATE * a.BV / C},
    "channel_gradients": lambda _: {"CCK": 7.5},
    "halved_gradients": _halved,
    # Hand-written for Hopper. Every program of a head factors its chunks.
    "forward_loop": lambda a: {"CCK": a.WIDTH / (32 * a.GROUPS), "CCV": 2, "CKV": 3},
    "factor_chunks": lambda a: {"CCK": 1 / a.members},
    "find_maps": lambda _: {"CCV": 2, "CKV": 4},
    "compose_maps": lambda a: {"KKV": 3 * C / a.length},
    "scan_segments": _scan_segments,
    "scan_gradients": _scan_gradients,
}


def tell(grid: tuple[int, ...], kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The ``launch_metadata`` of all kernels: ``name``, ``bytes``, and ``flops16`` or ``flops32``."""
    a = SimpleNamespace(**given)
    sizes = [f"{name}={given[name]}" for name in SIZES if name in given]
    told = {"name": " ".join([kernel.name, *sizes]), "bytes": _bytes(a)}
    if kernel.name in PRODUCTS:
        first = next(t for t in map(_tensor, given.values()) if t is not None)
        told[f"flops{8 * first.element_size()}"] = _flops(a, PRODUCTS[kernel.name](a))
    return told


def _flops(a: SimpleNamespace, products: dict[str, float]) -> float:
    """The operations of all chunks and value heads, as if all chunks were full."""
    tokens = a.T if a.cu_seqlens is not None else _sequences(a) * a.T
    K, V = (a.WIDTH, a.WIDTH) if hasattr(a, "WIDTH") else (a.K, getattr(a, "V", 0))
    axes = {"C": C, "K": K, "V": V}
    one = sum(number * axes[x] * axes[y] * axes[z] for (x, y, z), number in products.items())
    return 2 * one * a.HV * tokens / C


def _bytes(a: SimpleNamespace) -> int:
    """The bytes of all tensors, each moved once. From a pool, only the states of the call's sequences count."""
    total = 0
    for name, t in vars(a).items():
        t = _tensor(t)
        if t is not None:
            states = name in STATES and t.dim() > 1
            total += (
                (STATES[name] * min(1, _sequences(a) / max(1, len(t))) if states else 1) * t.numel() * t.element_size()
            )
    return int(total)


def _tensor(argument: Any) -> Tensor | None:
    """The tensor of an argument that is a tensor or a descriptor, else None."""
    t = getattr(argument, "base", argument)
    return t if isinstance(t, Tensor) else None


def _sequences(a: SimpleNamespace) -> int:
    return a.N if hasattr(a, "N") else a.items // a.HV if hasattr(a, "items") else 1
