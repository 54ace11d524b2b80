"""Conversions of tensors that several contestants share."""

import torch
from torch import Tensor

from flash_delta import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate
from flash_delta.testing import Workload


def bounds(workload: Workload, x: dict[str, Tensor]) -> Tensor:
    """``cu_seqlens`` for an op without a batch axis."""
    if workload.packed:
        return x["cu_seqlens"]
    return torch.arange(workload.N + 1, device=x["q"].device, dtype=torch.int32) * workload.T


def activated(workload: Workload, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of an op that takes log decays and write strengths. PyTorch computes them from raw activations, as
    a model does in every call of such an op."""
    given = {name: t for name, t in x.items() if name not in ("A_log", "dt_bias")} | {"beta": x["beta"].sigmoid()}
    if "A_log" in x:
        parameters, bound = (x["g"], x["A_log"], x["dt_bias"]), workload.lower_bound
        if bound is not None:
            given["g"] = naive_kda_lowerbound_gate(*parameters, bound)
        else:
            given["g"] = (naive_kda_gate if workload.gate == "channel" else naive_gdn_gate)(*parameters)
    return given
