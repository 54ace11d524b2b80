"""A layer of fla, on fla's own ops or, after ``register()``, on this library's. The groups `fla-*` time it. Looked at:
fla 0.6.0.

Nothing calls ``unregister()``, because each contestant has a process of its own.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from flash_delta.bench.contestants.call import Call
from flash_delta.testing import Workload
from flash_delta.testing.layer import INPUTS


def unsupported() -> str | None:
    return None if find_spec("fla") else "the layer is one of fla, which is not installed"


def prepare(workload: Workload, x: dict[str, Tensor], *, registered: bool = False) -> Call:
    from fla import layers

    from flash_delta.integrations.fla import register

    report = register() if registered else None
    w, training = workload, workload.kind == "training"
    hidden = x["hidden_states"].detach().requires_grad_(training)
    kind = layers.KimiDeltaAttention if w.member == "kda" else layers.GatedDeltaNet
    with hidden.device:
        layer = kind(w.hidden, expand_v=w.V / w.K, head_dim=w.K, num_heads=w.H, num_v_heads=w.HV)
    layer = layer.to(hidden.dtype).requires_grad_(training).train(training)
    layer.load_state_dict({name: t for name, t in x.items() if name not in INPUTS})
    packed = {"cu_seqlens": x["cu_seqlens"].long()} if w.packed else {}  # the documented dtype

    def run() -> tuple[Tensor, None]:
        with torch.set_grad_enabled(training):
            y, *_ = layer(hidden, **packed)
        if report is not None and report.left:
            raise RuntimeError(f"register: expected no call left to fla, got {report.left}")
        return y, None

    return Call(run, {"hidden_states": hidden} | dict(layer.named_parameters()))
