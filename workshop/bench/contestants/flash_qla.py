"""FlashQLA (TileLang kernels). Looked at: 0.1.3.

It has Gated DeltaNet in chunks, forward and backward, K = V = 128, in bfloat16 and float16, without gates in the op:
PyTorch computes them from raw activations in every call. It runs on Hopper and Blackwell. On other GPUs its import
fails.
"""

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call, leaves
from workshop.bench.contestants.call import NO_CHOICE, NO_LAYER
from workshop.bench.contestants.tensors import activated

PACKAGE = "flash_qla"
CACHES = ("TILELANG_CACHE_DIR", "TVM_FFI_CACHE_DIR")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its TileLang kernels need a GPU"
    if workload.hidden:
        return NO_LAYER
    if workload.member != "gdn":
        return "it has Gated DeltaNet only"
    if workload.recurrent:
        return "it has no op for decoding"
    if workload.disable_recompute:
        return NO_CHOICE
    if (workload.K, workload.V) != (128, 128) or workload.dtype not in ("bfloat16", "float16"):
        return "it takes K = V = 128 in bfloat16 or float16 only"
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    from flash_qla import chunk_gated_delta_rule

    gates = {name: x[name].float() for name in ("g", "beta") if not workload.raw}  # its backward takes no other g
    inputs = leaves(workload, x | gates)

    def run() -> tuple[Tensor, Tensor | None]:
        given = activated(workload, inputs) if workload.raw else inputs
        return chunk_gated_delta_rule(
            **given | {"beta": given["beta"].float()},
            use_qk_l2norm_in_kernel=workload.l2norm,
            output_final_state=workload.states,
        )

    return Call(run, inputs)
