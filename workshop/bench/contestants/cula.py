"""cuLA (CUDA C++ on CUTLASS, with fla's Triton kernels for norms and sums of gates). Looked at: 0.1.0 at fa742a2.

Its prefill for Hopper is KDA's forward pass in bfloat16, K = V = 128, with as many value heads as key heads. Log decays
are at least -5, and are given or computed from raw activations. It takes write strengths, so PyTorch's sigmoid is part
of the time. Its op for training needs Blackwell. It is built from source: https://github.com/inclusionAI/cuLA
"""

import os

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.bench.contestants.call import NO_LAYER

PACKAGE = "cuda-linear-attention"
CACHES = ("TRITON_CACHE_DIR",)


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its kernels need a GPU"
    if workload.hidden:
        return NO_LAYER
    if workload.member != "kda":
        return "it has KDA only"
    if workload.recurrent:
        return "only its prefill is called here"
    if (workload.K, workload.V) != (128, 128) or workload.dtype != "bfloat16":
        return "it takes K = V = 128 in bfloat16 only"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "its prefill is for sm_90"
    if workload.kind == "training":
        return "its op for training needs Blackwell"
    if workload.H != workload.HV:
        return "it takes ungrouped heads only"
    if workload.lower_bound is None:
        return "its gate has a lower bound"
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    os.environ.setdefault("FLA_USE_FAST_OPS", "1")  # as in its own benchmarks
    from cula.kda.hopper_fused_fwd import cula_kda_prefill

    inputs = {name: x[name] for name in ("q", "k", "v", "g")}
    chosen = {"output_final_state": workload.states, "use_qk_l2norm_in_kernel": workload.l2norm, "safe_gate": True}
    if workload.states:
        chosen["initial_state"] = x["initial_state"].mT.contiguous()  # [N, HV, V, K]
    if workload.packed:
        chosen["cu_seqlens"] = x["cu_seqlens"]
    if workload.raw:
        chosen |= {"use_gate_in_kernel": True, "lower_bound": workload.lower_bound}
        chosen |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}

    def run() -> tuple[Tensor, Tensor | None]:
        beta = x["beta"].sigmoid() if workload.raw else x["beta"]
        return cula_kda_prefill(**inputs, beta=beta, **chosen)

    return Call(run, x, state_v_first=True)
