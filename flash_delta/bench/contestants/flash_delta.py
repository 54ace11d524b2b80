"""This library: public ops, on the backend that they choose. It runs every row; serving rows use a pool of states."""

import torch
from torch import Tensor

from flash_delta import decode_gated_delta_rule, decode_kda, prefill_gated_delta_rule, prefill_kda
from flash_delta.bench.contestants import fla_layer, layer
from flash_delta.bench.contestants.call import GIVEN, Call, of_layers
from flash_delta.bench.contestants.tensors import draft_pool, leaves, pool_of, state_pool
from flash_delta.layers import GatedDeltaNet
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import Workload, activations, options
from flash_delta.testing.layer import EPS

PACKAGE = "flash-delta"
CACHES = ("TRITON_CACHE_DIR",)
AROUND = ("mixed", "windows", "conv_weight", "norm_gate", "norm_weight")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if not workload.hidden or _own_layer(workload):
        return None
    return fla_layer.unsupported() if workload.of_fla else layer.unsupported()


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    if _own_layer(workload):
        return _layers(workload, x)
    if workload.of_fla:
        return fla_layer.prepare(workload, x, registered=True)
    if workload.hidden:
        return layer.prepare(workload, x, "flash_delta")
    if workload.kind == "prefill":
        return prefill(workload, x)
    if workload.kind == "decode":
        return _decode(workload, x)
    inputs, op, chosen = leaves(workload, x), workload.op.op, options(workload)
    if workload.packed and not workload.on_device:
        inputs["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    return Call(lambda: op(**inputs, **chosen), inputs)


def _own_layer(workload: Workload) -> bool:
    """Whether this library's layer runs the row, which has the parameters of fla's layer, and not fla's, registered."""
    return workload.of_fla and bool(workload.form)


def _layers(workload: Workload, x: dict[str, Tensor]) -> Call:
    w = workload
    widths = {"expand_v": w.V / w.K, "head_dim": w.K, "num_heads": w.H, "num_v_heads": w.HV}
    each = [GatedDeltaNet(w.hidden, **widths) for _ in range(w.layers)]
    return of_layers(w, x, each, {name: x[name] for name in GIVEN if name in x})


def _decode(workload: Workload, x: dict[str, Tensor]) -> Call:
    """Decoding in place. The states after each token of a draft go to slots of their own, to which trees go back."""
    op = decode_kda if workload.member == "kda" else decode_gated_delta_rule
    inputs, chosen = without_state(x), activations(workload)
    if workload.around:
        inputs, around = with_around(inputs, x["windows"].clone())
        chosen |= around
    pool, read = state_pool(x)
    write, states = read, pool
    if workload.T > 1:
        pool, read, write, states = draft_pool(workload, x)
    if workload.tree:
        chosen["parent_idx"] = write.new_tensor([workload.parents] * workload.N)

    def run() -> tuple[Tensor, Tensor | None]:
        o = op(**inputs, state_pool=pool, read_indices=read, write_indices=write, state_v_first=True, **chosen)
        return o, states

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)


def prefill(workload: Workload, x: dict[str, Tensor], backend: str | None = None) -> Call:
    """Prefill that reads some slots and writes others, so that all calls start from the same states."""
    op = prefill_kda if workload.member == "kda" else prefill_gated_delta_rule
    inputs, chosen = without_state(x), activations(workload)
    chosen |= {"batch_invariant": workload.batch_invariant, "backend": backend}
    if workload.around:
        windows, *_ = pool_of({"initial_state": x["windows"].mT}, 1)
        inputs, around = with_around(inputs, windows)
        chosen |= around
    count = workload.T // workload.checkpoint_every if workload.checkpoint_every else 0
    pool, read, write, states = pool_of(x, count + 1)
    if 1 in workload.lengths:  # a server knows this number
        chosen["max_prompts"] = len(workload.lengths) - workload.lengths.count(1)
    if count:
        chosen |= {"checkpoint_every": workload.checkpoint_every, "checkpoint_indices": write[:, :count]}
    last = write[:, count].contiguous()

    def run() -> tuple[Tensor, Tensor | None]:
        o = op(**inputs, state_pool=pool, read_indices=read, write_indices=last, state_v_first=True, **chosen)
        return o, states

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)


def without_state(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in x.items() if name != "initial_state"}


def with_around(x: dict[str, Tensor], windows: Tensor) -> tuple[dict[str, Tensor], dict[str, Convolution | OutputNorm]]:
    """The inputs of the rule, and the convolution and the norm around it."""
    norm = OutputNorm(x["norm_gate"], x["norm_weight"], EPS)
    inputs = {name: t for name, t in x.items() if name not in AROUND}
    return inputs, {"convolution": Convolution(windows, x["conv_weight"]), "output_norm": norm}
