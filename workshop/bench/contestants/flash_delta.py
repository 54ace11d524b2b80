"""This library: public ops, on the backend that they choose. It runs every row; serving rows use a pool of states."""

import torch
from torch import Tensor

from flash_delta.layers import GatedDeltaNet
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import Workload, calls
from flash_delta.testing.calls import Call, pool_of
from workshop.bench.contestants import fla_layer, layer
from workshop.bench.contestants.call import GIVEN, of_layers
from workshop.check.layer import EPS

PACKAGE = "flash-delta"
CACHES = ("TRITON_CACHE_DIR",)
AROUND = ("mixed", "windows", "conv_weight", "norm_gate", "norm_weight")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    if not workload.hidden or _own_layer(workload):
        return None
    return fla_layer.unsupported() if workload.of_fla else layer.unsupported()


def prepare(workload: Workload, x: dict[str, Tensor], backend: str | None = None) -> Call:
    if _own_layer(workload):
        return _layers(workload, x)
    if workload.of_fla:
        return fla_layer.prepare(workload, x, registered=True)
    if workload.hidden:
        return layer.prepare(workload, x, "flash_delta")
    if workload.kind == "prefill":
        return prefill(workload, x, backend)
    if workload.kind == "decode" and workload.around:
        inputs, around = with_around(x, x["windows"].clone())
        return calls.decode(workload, inputs, **around)
    return calls.prepare(workload, x, backend)


def prefill(workload: Workload, x: dict[str, Tensor], backend: str | None) -> Call:
    around = {}
    if workload.around:
        windows, *_ = pool_of({"initial_state": x["windows"].mT}, 1)
        x, around = with_around(x, windows)
    return calls.prefill(workload, x, backend, **around)


def _own_layer(workload: Workload) -> bool:
    """Whether this library's layer runs the row, which has the parameters of fla's layer, and not fla's, registered."""
    return workload.of_fla and bool(workload.form)


def _layers(workload: Workload, x: dict[str, Tensor]) -> Call:
    w = workload
    widths = {"expand_v": w.V / w.K, "head_dim": w.K, "num_heads": w.H, "num_v_heads": w.HV}
    each = [GatedDeltaNet(w.hidden, **widths) for _ in range(w.layers)]
    return of_layers(w, x, each, {name: x[name] for name in GIVEN if name in x})


def with_around(x: dict[str, Tensor], windows: Tensor) -> tuple[dict[str, Tensor], dict[str, Convolution | OutputNorm]]:
    """The inputs of the rule, and the convolution and the norm around it."""
    norm = OutputNorm(x["norm_gate"], x["norm_weight"], EPS)
    inputs = {name: t for name, t in x.items() if name not in AROUND}
    return inputs, {"convolution": Convolution(windows, x["conv_weight"]), "output_norm": norm}
