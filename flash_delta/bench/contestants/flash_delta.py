"""This library, by its public ops, on whatever backend it chooses. It runs every row."""

import torch
from torch import Tensor

from flash_delta import explain
from flash_delta.bench.contestants.call import Call
from flash_delta.bench.contestants.tensors import leaves
from flash_delta.testing import Workload, options

PACKAGE = "flash-delta"
CACHES = ("TRITON_CACHE_DIR",)


def unsupported(workload: Workload, device: torch.device) -> str | None:
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    inputs, op, chosen = leaves(workload, x), workload.op.op, options(workload)
    if workload.packed and explain(op, **inputs, **chosen).backend is None:
        # The torch backend plans on the host and never reads a device.
        inputs["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    return Call(lambda: op(**inputs, **chosen), inputs)
