"""What a launch tells a profiler: the kernel's sizes, its operations and its bytes.

Triton asks for it when a hook watches launches, as Proton's does. Then known calls go through Triton's launcher, too
(`calls.profiled`). Nothing here runs when nobody watches.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_delta.kernels.device.chunk import C

SIZES = ("N", "T", "M", "H", "HV", "K", "V", "WIDTH", "D", "W")  # arguments that stand in a launch's name
STATES = {  # times moved; inputs that windows are written from count with these
    "pool": 2, "conv_pool": 2, "conv_target": 1, "windows": 1, "initial": 1, "initial_state": 1, "final": 1,
    "final_state": 1, "inputs_q": 0, "inputs_k": 0, "inputs_v": 0,
}  # fmt: skip


def _scan(erase: bool, output: bool, solved: bool) -> dict[str, float]:
    """``solved``: U is found from R in the loop."""
    return {"CCV": output + (erase and solved), "CKV": 1 + erase + output}


def _scan_or_maps(a: Any) -> dict[str, float]:
    """A map of a segment has K columns more than a state (segments.py)."""
    found = _scan(a.ERASE, a.OUTPUT, a.SAVE or a.CHANNEL)
    maps = {"CCK": found["CCV"], "CKK": found["CKV"]} if a.SEGMENTS and not a.OUTPUT else {}
    return found | maps


def _scan_backward(a: Any) -> dict[str, float]:
    again = _scan(a.ERASE, False, True) if a.RECOMPUTE else {"CCV": 0, "CKV": 0}
    return {"CCV": 1 + a.CHANNEL + again["CCV"], "CKV": 2 + a.ERASE + again["CKV"]}


def _pairs(a: Any) -> dict[str, float]:
    """Its sums over pairs of tokens are products with ones, of float32 numbers in parts."""
    scores = 0 if a.CHANNEL else a.GATE + (a.ERASE and (a.GATE or a.HAS_BETA))
    sums = a.GATE * (1 + a.UNDECAYED) * (3 if a.k.dtype == torch.float32 else 2)
    return {"CCK": scores, "CCV": 1 + a.ERASE, "CCC": sums, "CKV": 3 * a.STATES}


def _halved(a: Any) -> dict[str, float]:
    """In bfloat16 it works on chunks with strong gates only, which no host counts."""
    return {} if a.k.dtype == torch.bfloat16 else {"CCK": 33.5, "CKV": 3}


def _walk_segments(a: Any) -> dict[str, float]:
    """Without q nothing is read from the state but what is erased."""
    reads = a.q_desc is not None
    return {"CCK": reads * a.WIDTH / (64 * a.GROUPS), "CCV": 1 + reads, "CKV": 2 + reads}


def _walk_back(a: Any) -> dict[str, float]:
    """A map of a segment needs the gradient of its state only. Sums over pairs are products with ones, of two parts."""
    if not a.GRADIENTS:
        return {"CCK": 1, "CCV": 2, "CKV": 3}
    return {"CCK": 6, "CCV": 4, "CKV": 6, "CCC": 2 * a.GATE}


# How many matrix products a kernel issues for a chunk and value head, by their size: 2 of C x K x V are {"CKV": 2}.
# Keyed by kernel; a function takes the kernel's arguments by name. What is absent issues none.
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
    # By hand for Hopper. Every program of a head factors its chunks.
    "forward_loop": lambda a: {"CCK": a.WIDTH / (32 * a.GROUPS), "CCV": 2, "CKV": 3},
    "factor_chunks": lambda a: {"CCK": 1 / a.members},
    "find_maps": lambda _: {"CCV": 2, "CKV": 4},
    "compose_maps": lambda a: {"KKV": 3 * C / a.length},
    "walk_segments": _walk_segments,
    "walk_back": _walk_back,
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
    """Of all chunks and value heads, as if all chunks were full."""
    tokens = a.T if a.cu_seqlens is not None else _sequences(a) * a.T
    K, V = (a.WIDTH, a.WIDTH) if hasattr(a, "WIDTH") else (a.K, getattr(a, "V", 0))
    axes = {"C": C, "K": K, "V": V}
    one = sum(number * axes[x] * axes[y] * axes[z] for (x, y, z), number in products.items())
    return 2 * one * a.HV * tokens / C


def _bytes(a: SimpleNamespace) -> int:
    """Of all tensors, each moved once; of states those of the call's sequences, since a pool has more."""
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
    """An argument that is one, or a descriptor of one."""
    t = getattr(argument, "base", argument)
    return t if isinstance(t, Tensor) else None


def _sequences(a: SimpleNamespace) -> int:
    return a.N if hasattr(a, "N") else a.items // a.HV if hasattr(a, "items") else 1
