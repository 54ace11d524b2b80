"""The PyTorch code of Hugging Face transformers, which its models run if no kernel library is installed.

Looked at: 5.17.0 and 5.23.0 (Qwen3-Next, Kimi Linear). The op has no packed sequences, no gate and no sigmoid.
"""

import inspect

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call, leaves
from workshop.bench.contestants import layer
from workshop.bench.contestants.call import NO_CHOICE
from workshop.bench.contestants.tensors import activated

PACKAGE = "transformers"
CACHES = ()


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if workload.of_fla:
        return "the layer is one of fla"
    if workload.member not in ("gdn", "kda"):
        return "only its Gated DeltaNet and its Kimi Delta Attention are called here"
    if workload.disable_recompute:
        return NO_CHOICE
    return "its fallback cannot keep packed sequences apart" if workload.packed and workload.N != 1 else None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    if workload.hidden:
        return layer.prepare(workload, x, "PyTorch")
    if workload.member == "gdn":
        from transformers.models.qwen3_next import modeling_qwen3_next as model

        name = "torch_recurrent_gated_delta_rule" if workload.recurrent else "torch_chunk_gated_delta_rule"
    else:
        from transformers.models.kimi_linear import modeling_kimi_linear as model

        name = "recurrent_kimi_delta_attention" if workload.recurrent else "chunk_kimi_delta_attention"
    op = inspect.unwrap(getattr(model, name))  # if fla can be imported, the name is bound to fla's op
    inputs = leaves(workload, {name: t for name, t in x.items() if not name.startswith("cu_seqlens")})
    group = workload.HV // workload.H

    def run() -> tuple[Tensor, Tensor | None]:
        q, k, g, beta = (inputs[name] for name in ("q", "k", "g", "beta"))
        if group > 1:  # in 5.17 the model copies heads, in 5.23 the op makes the same copies
            q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
        if workload.raw:  # the models do this before the op, in every call
            g, beta = (activated(workload, inputs)[name] for name in ("g", "beta"))
        return op(
            q,
            k,
            inputs["v"],
            g=g,
            beta=beta,
            initial_state=inputs.get("initial_state"),
            output_final_state=workload.states,
            use_qk_l2norm_in_kernel=workload.l2norm,
        )

    return Call(run, inputs)
