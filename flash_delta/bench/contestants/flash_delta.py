"""This library, by its public ops, on whatever backend it chooses. It runs every row."""

import torch
from torch import Tensor

from flash_delta.bench.contestants.call import Call
from flash_delta.bench.contestants.tensors import leaves
from flash_delta.testing import Workload, options

PACKAGE = "flash-delta"
CACHES = ("TRITON_CACHE_DIR",)  # of kernel backends; the torch backend compiles nothing


def unsupported(workload: Workload, device: torch.device) -> str | None:
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    inputs, op, chosen = leaves(workload, x), workload.op.op, options(workload)
    if workload.packed:
        inputs["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()  # no backend reads the device
    return Call(lambda: op(**inputs, **chosen), inputs)
