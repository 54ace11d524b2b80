"""The cuDNN frontend's linear attention on Hopper (CUDA C++, compiled at run time). Looked at: 1.32.0.

It has KDA of packed sequences in bfloat16, K = V = 128; raw gates need a lower bound. The kernel reads gates and write
strengths in float32. The backward pass needs log decays, normalised q and k, and as many value heads as key heads.
There is no Gated DeltaNet on Hopper before CUDA 13.3, and no decoding. A long sequence is cut into pieces. The plan
does not compute the state before a piece. Instead each piece reads some tokens before it, so many that the state
before those has decayed.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call, leaves
from workshop.bench.contestants.call import NO_CHOICE, NO_LAYER
from workshop.bench.contestants.tensors import bounds

PACKAGE = "nvidia-cudnn-frontend"
CACHES = ("CUDNN_FRONTEND_CAKE_CACHE_DIR",)
PLAN = "kda_hopper_cuda"
TOOLKIT = "/usr/local/cuda"


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its kernels need a GPU"
    if workload.hidden:
        return NO_LAYER
    if workload.member != "kda":
        return "its Gated DeltaNet needs Blackwell, or cuTile with CUDA 13.3"
    if workload.recurrent:
        return "it has no op for decoding"
    if (workload.K, workload.V) != (128, 128) or workload.dtype != "bfloat16":
        return f"its plan {PLAN} takes K = V = 128 in bfloat16 only"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"its plan {PLAN} is for sm_90"
    if workload.kind == "training" and (workload.raw or workload.l2norm or workload.H != workload.HV):
        return f"the backward of {PLAN} takes log decays, normalised q and k, and ungrouped heads only"
    if workload.disable_recompute:
        return NO_CHOICE
    if workload.lower_bound is None:
        return "its gate has a lower bound"
    return None


def ready_made(workload: Workload) -> str | None:
    if not workload.raw:
        return None  # all contestants get gates and write strengths in float32
    return f"its gates and write strengths come in float32, converted before the time; the others' in {workload.dtype}"


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    return call(workload, x, torch.float32)


def call(workload: Workload, x: dict[str, Tensor], gates: torch.dtype) -> Call:
    """A call with gates and write strengths in the dtype ``gates``. It converts them unless this is float32."""
    if Path(TOOLKIT, "include", "cuda_bf16.h").is_file():  # otherwise it uses headers from Python packages
        os.environ.setdefault("CUDA_HOME", TOOLKIT)
    from cudnn.linear_attention.ops import kimi_delta_attention

    inputs = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}  # [tokens, heads, width]
    inputs |= {name: inputs[name].to(gates) for name in ("g", "beta")}
    if workload.states:
        inputs["initial_state"] = x["initial_state"].mT.contiguous()  # [N, HV, V, K]
    if workload.raw:
        inputs |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"].view(workload.HV, workload.K)}
    inputs = leaves(workload, inputs | {"cu_seqlens": bounds(workload, x)})

    def run() -> tuple[Tensor, Tensor | None]:
        o, final_state = kimi_delta_attention(
            *(inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")),
            initial_state=inputs.get("initial_state"),
            output_final_state=workload.states,
            use_qk_l2norm_in_kernel=workload.l2norm,
            use_beta_sigmoid_in_kernel=workload.raw,
            safe_gate=workload.raw,
            gate_lower_bound=workload.lower_bound if workload.raw else None,
            a_log=inputs.get("A_log"),
            dt_bias=inputs.get("dt_bias"),
            plan_name=PLAN,
        )
        return o, final_state if workload.states else None

    return Call(run, inputs, state_v_first=True)
