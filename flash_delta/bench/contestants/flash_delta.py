"""This library, by its public ops, on whatever backend it chooses. It runs every row; decoding on a pool of states."""

import torch
from torch import Tensor

from flash_delta import decode_gated_delta_rule, decode_kda, explain
from flash_delta.bench.contestants.call import Call
from flash_delta.bench.contestants.tensors import leaves, state_pool
from flash_delta.testing import Workload, activations, options

PACKAGE = "flash-delta"
CACHES = ("TRITON_CACHE_DIR",)


def unsupported(workload: Workload, device: torch.device) -> str | None:
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    if workload.kind == "decode":
        return _decode(workload, x)
    inputs, op, chosen = leaves(workload, x), workload.op.op, options(workload)
    if workload.packed and explain(op, **inputs, **chosen).backend is None:
        # The torch backend plans on the host and never reads a device.
        inputs["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    return Call(lambda: op(**inputs, **chosen), inputs)


def _decode(workload: Workload, x: dict[str, Tensor]) -> Call:
    op = decode_kda if workload.member == "kda" else decode_gated_delta_rule
    inputs, (pool, slots), chosen = dict(x), state_pool(x), activations(workload)
    del inputs["initial_state"]

    def run() -> tuple[Tensor, Tensor | None]:
        o = op(**inputs, state_pool=pool, read_indices=slots, write_indices=slots, state_v_first=True, **chosen)
        return o, pool

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)
