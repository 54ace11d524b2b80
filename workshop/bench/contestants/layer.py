"""A layer of transformers that each contestant runs on its own ops. The groups `layer` and `step-transformers`
time it.

The names by which transformers' code calls its ops are not restored, because each contestant has its own process.
"""

import inspect
from importlib.util import find_spec

import torch
from torch import Tensor

from flash_delta.testing import Workload
from flash_delta.testing.calls import Call
from workshop.bench.contestants.call import of_layers
from workshop.check.drawn import TAPS
from workshop.check.layer import EPS, INPUTS


def unsupported() -> str | None:
    return None if find_spec("transformers") else "the layer is one of transformers, which is not installed"


def prepare(workload: Workload, x: dict[str, Tensor], ops: str) -> Call:
    """``ops``: "flash_delta", "PyTorch" (transformers' own code), or "as installed"."""
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as model

    _bind(model, ops)
    w = workload
    config = Qwen3NextConfig(
        hidden_size=w.hidden, linear_num_key_heads=w.H, linear_num_value_heads=w.HV, linear_key_head_dim=w.K,
        linear_value_head_dim=w.V, linear_conv_kernel_dim=TAPS, rms_norm_eps=EPS, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    if w.kind in ("forward", "training"):
        each = [model.Qwen3NextGatedDeltaNet(config, 0) for _ in range(w.layers)]
        return of_layers(w, x, each, _packing(w, x))
    hidden = x["hidden_states"].detach()
    layer = model.Qwen3NextGatedDeltaNet(config, 0).to(hidden.device, hidden.dtype).requires_grad_(False)
    layer.load_state_dict({name: t for name, t in x.items() if name not in INPUTS})
    begun = DynamicCache(config=config)
    if w.kind == "decode":
        with torch.no_grad():
            layer(x["seen"], begun)

    def run() -> tuple[Tensor, None]:
        with torch.no_grad():
            return layer(hidden, begun if w.kind == "decode" else DynamicCache(config=config)), None

    return Call(run, {"hidden_states": hidden} | dict(layer.named_parameters()))


def _packing(workload: Workload, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """What models tell their layers about padding or packed sequences."""
    if not workload.packed:
        return {name: x[name] for name in ("attention_mask",) if name in x}
    numbers = torch.arange(workload.N, device=x["cu_seqlens"].device, dtype=torch.int32)
    return {"cu_seq_lens_q": x["cu_seqlens"], "seq_idx": numbers.repeat_interleave(workload.T)[None]}


def _bind(model, ops: str) -> None:
    from flash_delta.integrations.transformers import CONVOLUTIONS, RULES, disable, enable

    disable()
    if ops == "flash_delta":
        enable()
    elif ops == "PyTorch":
        names = [name for name in RULES | CONVOLUTIONS if name in vars(model)]
        vars(model).update({name: inspect.unwrap(vars(model)[name]) for name in names})
