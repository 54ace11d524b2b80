"""FlashInfer (CuTe DSL kernels). Looked at: 0.7.2.post1.

It has only inference, K = V = 128, in bfloat16 and float16. For Gated DeltaNet it has prefill of packed sequences from
log decays. It also decodes from raw activations on a pool of states, with separate kernels for float32 and bfloat16
states. It verifies drafts with a state for each token; its form that keeps the inputs instead needs Blackwell, and so
do its kernels for KDA.
"""

import torch
from torch import Tensor

from flash_delta import fused_gdn_gate
from flash_delta.testing import Workload
from flash_delta.testing.calls import Call, draft_pool, state_pool, without_state
from workshop.bench.contestants import separate
from workshop.bench.contestants.call import NO_LAYER
from workshop.bench.contestants.tensors import bounds

PACKAGE = "flashinfer-python"
CACHES = ("FLASHINFER_WORKSPACE_BASE", "CUTE_DSL_CACHE_DIR", "TVM_FFI_CACHE_DIR")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its kernels need a GPU"
    if workload.hidden:
        return NO_LAYER
    if workload.kind == "training":
        return "it has no backward"
    if workload.member != "gdn":
        return "its KDA is for Blackwell"
    if (workload.K, workload.V) != (128, 128) or workload.dtype not in ("bfloat16", "float16"):
        return "it takes K = V = 128 in bfloat16 or float16 only"
    if workload.recurrent and not (workload.raw and workload.states):
        return "its decoding takes raw activations and a state"
    if workload.recurrent and workload.state_dtype not in ("float32", "bfloat16"):
        return "its decoding takes states in float32 or bfloat16 only"
    if (
        workload.recurrent
        and workload.T > 1
        and (workload.tree or workload.lengths or workload.state_dtype != "float32")
    ):
        return "its drafts are chains of one length, with states in float32"
    return None


def ready_made(workload: Workload) -> str | None:
    if workload.recurrent:
        return None
    if workload.raw:
        return "its decays and write strengths are computed before the time; the others get raw activations"
    return "its decays come as exp(g), taken before the time; the others get g"


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    if not workload.recurrent:
        return _prefill(workload, x)
    return _draft(workload, x) if workload.T > 1 else _decode(workload, x)


def _prefill(workload: Workload, x: dict[str, Tensor]) -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    state = x["initial_state"].mT.contiguous() if workload.states else None  # [N, HV, V, K]
    inputs = {name: x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}  # [tokens, heads, width]
    if workload.raw:
        g = fused_gdn_gate(inputs["g"], x["A_log"], x["dt_bias"])
        inputs |= {"g": g, "beta": inputs["beta"].float().sigmoid()}
    inputs |= {"g": inputs["g"].float().exp(), "beta": inputs["beta"].float(), "cu_seqlens": bounds(workload, x)}
    longest = None if workload.on_device else int(inputs["cu_seqlens"].diff().max())
    if workload.around:

        def rule(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
            heads = {"q": q[0].contiguous(), "k": k[0].contiguous(), "v": v[0].contiguous()}  # it takes no others
            o, last = chunk_gated_delta_rule(
                **(inputs | heads),
                initial_state=first,
                output_final_state=True,
                use_qk_l2norm_in_kernel=workload.l2norm,
                max_seqlen=longest,
            )
            return o.unsqueeze(0), last

        return separate.prepare(workload, x, rule, state_v_first=True)

    def run() -> tuple[Tensor, Tensor | None]:
        out = chunk_gated_delta_rule(
            **inputs,
            initial_state=state,
            output_final_state=workload.states,
            use_qk_l2norm_in_kernel=workload.l2norm,
            max_seqlen=longest,  # without it, grids are as large as if one sequence had all tokens
        )
        return out if workload.states else (out, None)

    return Call(run, inputs, state_v_first=True)


def _decode(workload: Workload, x: dict[str, Tensor]) -> Call:
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    pool, slots = state_pool(x)
    output = x["v"].new_empty(x["v"].shape)  # a server has such a buffer; without it every call makes and zeros one

    def step(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule_decode_pretranspose(
            q,
            k,
            v,
            state=None,
            initial_state=pool,  # updated in place
            initial_state_indices=slots,
            A_log=x["A_log"],
            a=x["g"],
            dt_bias=x["dt_bias"],
            b=x["beta"],
            output=output,
            use_qk_l2norm=workload.l2norm,
        )

    if workload.around:
        return separate.prepare_step(workload, x, lambda *given: step(*given)[0])
    q, k, v = (x[name] for name in "qkv")
    return Call(lambda: step(q, k, v, pool, slots), {**x, "initial_state": pool}, state_v_first=True)


def _draft(workload: Workload, x: dict[str, Tensor]) -> Call:
    from flashinfer.gdn_decode import gated_delta_rule_mtp

    pool, read, write, states = draft_pool(workload, x)
    inputs = without_state(x)
    output = x["v"].new_empty(x["v"].shape)  # a server has such a buffer

    def run() -> tuple[Tensor, Tensor]:
        o, _ = gated_delta_rule_mtp(
            **{name: inputs[name] for name in ("q", "k", "v", "A_log", "dt_bias")},
            a=inputs["g"],
            b=inputs["beta"],
            initial_state=pool,
            initial_state_indices=read,
            ssm_state_indices=write,
            disable_state_update=False,
            output=output,
            use_qk_l2norm=workload.l2norm,
        )
        return o, states

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)
