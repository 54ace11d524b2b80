"""FlashKDA (CUDA C++ on CUTLASS). Looked at: 0.0.1 at 1ce47ea.

It has KDA's forward pass from raw activations with a bounded gate, in bfloat16, K = V = 128, with as many value heads
as key heads. States are float32 or bfloat16. It is built from source: https://github.com/MoonshotAI/FlashKDA
"""

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call

PACKAGE = "flash_kda"
CACHES = ()


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its kernels need a GPU"
    if workload.hidden:
        return "it is an op, which fla's layers may call"
    if workload.member != "kda":
        return "it has KDA only"
    if workload.recurrent:
        return "it has no op for decoding"
    if (workload.K, workload.V) != (128, 128) or workload.dtype != "bfloat16":
        return "it takes K = V = 128 in bfloat16 only"
    if workload.kind == "training":
        return "it has no backward"
    if workload.H != workload.HV:
        return "it takes ungrouped heads only"
    if not (workload.raw and workload.l2norm):
        return "it takes raw activations, and q and k before their norm"
    if workload.lower_bound is None:
        return "its gate has a lower bound"
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    from flash_kda import fwd

    state = x["initial_state"].mT.contiguous() if workload.states else None  # [N, HV, V, K]
    A_log, dt_bias = x["A_log"], x["dt_bias"].view(workload.HV, workload.K)
    bounds = x["cu_seqlens"].long() if workload.packed else None

    def run() -> tuple[Tensor, Tensor | None]:
        o, final_state = torch.empty_like(x["v"]), None if state is None else torch.empty_like(state)
        fwd(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            scale=workload.K**-0.5,
            out=o,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=workload.lower_bound,
            initial_state=state,
            final_state=final_state,
            cu_seqlens=bounds,
        )
        return o, final_state

    return Call(run, x, state_v_first=True)
