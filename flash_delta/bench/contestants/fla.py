"""flash-linear-attention (Triton kernels). Looked at: 0.6.0; it needs a GPU.

On Hopper it refuses the backward of Gated DeltaNet with Triton >= 3.4.0 and < 3.7.1, which miscompiles it.
"""

import os

import torch
from torch import Tensor

from flash_delta.bench.contestants.call import NO_CHOICE, Call
from flash_delta.bench.contestants.tensors import leaves
from flash_delta.testing import Workload, options

PACKAGE = "fla-core"  # the part with the ops; flash-linear-attention adds layers and models
CACHES = ("TRITON_CACHE_DIR",)

# Where FlashQLA, FlashKDA or TileLang is installed, it hands calls to them, but its own kernels are meant here.
DELEGATES = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its Triton kernels need a GPU"
    if workload.disable_recompute and workload.member == "gdn":
        return NO_CHOICE
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    for variable in DELEGATES:
        os.environ[variable] = "0"
    from fla import ops

    inputs, op, chosen = leaves(workload, x), getattr(ops, workload.op.name), options(workload)
    if workload.packed:
        inputs["cu_seqlens"] = x["cu_seqlens"].long()  # the dtype that it documents
        inputs["cu_seqlens_cpu"] = inputs["cu_seqlens"].cpu()
    if workload.op.name == "chunk_kda":  # its faster path, for whoever knows that no log decay is below -5
        chosen["safe_gate"] = workload.raw or bool((x["g"] >= workload.lower_bound).all())
    return Call(lambda: op(**inputs, **chosen), inputs)
