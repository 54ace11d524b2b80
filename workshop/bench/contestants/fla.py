"""flash-linear-attention (Triton kernels). Looked at: 0.6.0; it needs a GPU.

On Hopper it refuses the backward pass of Gated DeltaNet with Triton >= 3.4.0 and < 3.7.1, which miscompile it. Its
decoding ops return new states in float32 from every call. For KDA, fla also has a function that updates a pool in
place, with a state for each token of a draft, and this module calls that function. After a rejected draft its op of
Gated DeltaNet has to run the accepted tokens again, which is not timed.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from flash_delta.testing import Workload, activations, options
from flash_delta.testing.calls import Call, draft_pool, leaves, state_pool, without_state
from workshop.bench.contestants import fla_layer, layer, separate
from workshop.bench.contestants.call import NO_CHOICE
from workshop.bench.contestants.tensors import activated

PACKAGE = "fla-core"  # this package has the ops; flash-linear-attention adds layers and models
CACHES = ("TRITON_CACHE_DIR",)
RULE = ("g", "beta", "A_log", "dt_bias")
ELSEWHERE = {  # ops that fla.ops does not have
    "chunk_gdn2": "fla.ops.gdn2",
    "chunk_gated_delta_product": "fla.ops.gated_delta_product",
}

# If FlashQLA, FlashKDA or TileLang is installed, fla calls them. Here we want to time fla's own kernels.
DELEGATES = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its Triton kernels need a GPU"
    if workload.hidden:
        return fla_layer.unsupported() if workload.of_fla else layer.unsupported()
    if workload.recurrent and workload.T > 1 and (workload.tree or workload.lengths):
        return "its drafts are chains of one length"
    if workload.disable_recompute and workload.member == "gdn":
        return NO_CHOICE
    return None


def ready_made(workload: Workload) -> str | None:
    if workload.kind == "decode" and workload.T > 1 and workload.member == "gdn":
        return "it keeps no state for each token: after a rejected draft it runs the accepted tokens again, not timed"
    return None


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    for variable in DELEGATES:
        os.environ[variable] = "0"
    if workload.hidden:
        return fla_layer.prepare(workload, x) if workload.of_fla else layer.prepare(workload, x, "as installed")
    if workload.kind == "decode":
        return _decode_kda(workload, x) if workload.member == "kda" else _decode(workload, x)
    name = workload.op.name
    inputs, op, chosen = (
        leaves(workload, x),
        getattr(import_module(ELSEWHERE.get(name, "fla.ops")), name),
        options(workload),
    )
    if workload.around:
        return _prompts(workload, x, op)
    if workload.packed:
        inputs["cu_seqlens"] = x["cu_seqlens"].long()  # the dtype that it documents
        if not workload.on_device:
            inputs["cu_seqlens_cpu"] = inputs["cu_seqlens"].cpu()
    bound = workload.lower_bound
    if bound is not None:  # a faster path, valid if no log decay is below the bound
        chosen["safe_gate"] = workload.raw or bool((x["g"] >= bound).all())
    if workload.raw and workload.member in ("comba", "delta-rule"):  # its ops have no gates and no sigmoid
        outside = options(replace(workload, raw=False))
        return Call(lambda: op(**activated(workload, inputs), **outside), inputs)
    return Call(lambda: op(**inputs, **chosen), inputs)


def _prompts(workload: Workload, x: dict[str, Tensor], op: Callable[..., tuple[Tensor, Tensor]]) -> Call:
    bounds = x["cu_seqlens"].long()
    chosen = options(workload) | {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds.cpu()}

    def rule(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return op(q=q, k=k, v=v, g=x["g"], beta=x["beta"], initial_state=first, **chosen)

    return separate.prepare(workload, x, rule, state_v_first=False)


def _decode(workload: Workload, x: dict[str, Tensor]) -> Call:
    from fla.ops import fused_recurrent_gated_delta_rule as op

    if workload.around:
        given = {name: x[name] for name in RULE} | options(workload)

        def rule(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
            return op(q=q, k=k, v=v, initial_state=first, state_v_first=True, **given)

        return separate.prepare_step(workload, x, separate.on_gathered(rule))
    inputs, chosen = x | {"initial_state": state_pool(x)[0]}, options(workload)
    return Call(lambda: op(**inputs, **chosen, state_v_first=True), inputs, state_v_first=True)


def _decode_kda(workload: Workload, x: dict[str, Tensor]) -> Call:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    if workload.T > 1:
        return _draft_kda(workload, x)
    (pool, slots), chosen = state_pool(x), activations(workload)
    inputs = x | {"initial_state": pool}
    out = x["v"].new_empty(x["v"].shape)  # a server has such a buffer; without it every call makes and zeros one
    if workload.around:
        given = {name: x[name] for name in RULE} | chosen | {"inplace_final_state": True, "state_v_first": True}

        def step(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
            return fused_recurrent_kda_fwd(
                q=q, k=k, v=v, initial_state=pool, ssm_state_indices=slots, out=out, **given
            )[0]

        return separate.prepare_step(workload, x, step)

    def run() -> tuple[Tensor, Tensor | None]:
        return fused_recurrent_kda_fwd(
            **inputs, **chosen, ssm_state_indices=slots, inplace_final_state=True, state_v_first=True, out=out
        )

    return Call(run, inputs, state_v_first=True)


def _draft_kda(workload: Workload, x: dict[str, Tensor]) -> Call:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    pool, read, write, states = draft_pool(workload, x)
    states.copy_(pool[read])  # it reads the slot of the last accepted token
    inputs, chosen = without_state(x) | {"initial_state": pool}, activations(workload)
    chosen |= {"ssm_state_indices": write, "num_accepted_tokens": torch.full_like(read, workload.T)}
    out = x["v"].new_empty(x["v"].shape)

    def run() -> tuple[Tensor, Tensor]:
        o, _ = fused_recurrent_kda_fwd(**inputs, **chosen, inplace_final_state=True, state_v_first=True, out=out)
        return o, states

    return Call(run, inputs, state_v_first=True)
