"""Prompts and decoding steps with convolution and norm around the rule: tensors, computation, and how results are
judged.

    q, k, v = silu(conv(mixed))    o = RMSNorm(rule(q, k, v, g, beta)) silu(z)
"""

import torch
from torch import Tensor

from flash_delta.problem import ConvolutionProblem, Convolved, Normalized, NormProblem
from flash_delta.reference.elementwise import convolve, normalize
from flash_delta.testing.accuracy import relative_error
from flash_delta.testing.workload import Workload, make_tensors, options
from workshop.check.drawn import TAPS
from workshop.check.layer import EPS

OF_RULE = ("g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def make_elementwise(w: Workload, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Makes the tensors. q, k and v are slices of the projection ``mixed [B, T, D]``; ``windows [N, D, TAPS]``."""
    gen, dtype = torch.Generator(device).manual_seed(seed + 1), getattr(torch, w.dtype)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    D, (B, T) = 2 * w.H * w.K + w.HV * w.V, (1, w.tokens) if w.packed else (w.N, w.T)
    around = {
        "mixed": randn(B, T, D), "windows": randn(w.N, D, TAPS), "conv_weight": randn(D, TAPS) / 2,
        "norm_gate": randn(B, T, w.HV, w.V), "norm_weight": 1 + randn(w.V) / 4,
    }  # fmt: skip
    return make_tensors(w, device, seed) | dict(zip("qkv", heads_of(w, around["mixed"]), strict=True)) | around


def heads_of(w: Workload, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, as parts of ``mixed``."""
    keys = w.H * w.K
    q, k, v = mixed.split([keys, keys, w.HV * w.V], 2)
    return q.unflatten(2, (w.H, w.K)), k.unflatten(2, (w.H, w.K)), v.unflatten(2, (w.HV, w.V))


def run_around(w: Workload, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of the torch backend, one step after the other."""
    mixed, dtype, device = x["mixed"], x["mixed"].dtype, x["mixed"].device
    p = ConvolutionProblem("around", *mixed.shape, TAPS, w.N, dtype, device, packed=w.packed, activation="silu")
    mixed, _ = convolve(p, Convolved(mixed, x["conv_weight"], None, x["windows"], x.get("cu_seqlens")))
    given = {name: x[name] for name in OF_RULE if name in x}
    if w.packed:
        given["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    o, final_state = w.op.op(*heads_of(w, mixed), **given, **options(w), backend="torch")
    norm = NormProblem("around", w.V, dtype, device, eps=EPS, activation="silu")
    return {"o": normalize(norm, Normalized(o, x["norm_weight"], x["norm_gate"])), "final_state": final_state}


def judge_elementwise(w: Workload, x: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Returns for every result its error against float64, and that of PyTorch in the workload's own dtype."""
    truth = run_around(w, {name: t.double() if t.is_floating_point() else t for name, t in x.items()})
    reference = run_around(w, x)
    return {
        name: (relative_error(results[name], want), relative_error(reference[name], want))
        for name, want in truth.items()
    }
