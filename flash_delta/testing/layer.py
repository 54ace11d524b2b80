"""A whole layer of Qwen3-Next around the rule: its tensors, what it computes, and who is right.

    q, k, v = silu(conv(W_qkv x))    o = rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(b))
    y = W_o (RMSNorm(o) silu(z))     with z, a and b from x, too

Names, shapes and the order of projected columns are those of transformers' layer, which contestants run.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from flash_delta import chunk_gated_delta_rule, naive_gdn_gate
from flash_delta.problem import ConvolutionProblem, Convolved, Normalized, NormProblem
from flash_delta.reference.modules import convolve, normalize
from flash_delta.testing.accuracy import relative_error
from flash_delta.testing.workload import Workload

TAPS, EPS = 4, 1e-6
SEEN = 8  # tokens that a row has seen when it is decoded
INPUTS = ("hidden_states", "seen")  # the others are parameters


def make_layer(w: Workload, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Its parameters, and the hidden states, as a freshly initialised model would have them."""
    gen, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, w.dtype)

    def randn(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=gen, device=device)).to(dtype)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=gen, device=device)).to(dtype)

    keys, values = w.H * w.K, w.HV * w.V
    x = {
        "hidden_states": randn(w.N, w.T, w.hidden),
        "dt_bias": uniform(-7, -2.3, w.HV),  # steps from 0.001 to 0.1
        "A_log": uniform(0, 2.8, w.HV),  # rates from 1 to 16
        "conv1d.weight": uniform(-(TAPS**-0.5), TAPS**-0.5, 2 * keys + values, 1, TAPS),
        "in_proj_qkvz.weight": randn(2 * keys + 2 * values, w.hidden, std=w.hidden**-0.5),
        "in_proj_ba.weight": randn(2 * w.HV, w.hidden, std=w.hidden**-0.5),
        "norm.weight": uniform(0.5, 1.5, w.V),
        "out_proj.weight": randn(w.hidden, values, std=values**-0.5),
    }
    return x | ({"seen": randn(w.N, SEEN, w.hidden)} if w.kind == "decode" else {})


def run_layer(w: Workload, x: dict[str, Tensor]) -> Tensor:
    """y ``[N, T, hidden]`` by the torch backend; where rows have seen tokens, after these."""
    hidden, group = torch.cat([x[name] for name in reversed(INPUTS) if name in x], 1), w.HV // w.H
    (B, T, _), D, dtype, device = hidden.shape, 2 * w.H * w.K + w.HV * w.V, hidden.dtype, hidden.device
    qkvz = linear(hidden, x["in_proj_qkvz.weight"]).unflatten(-1, (w.H, -1))
    q, k, v, z = (t.flatten(2) for t in qkvz.split([w.K, w.K, group * w.V, group * w.V], -1))
    beta, a = (t.flatten(2) for t in linear(hidden, x["in_proj_ba.weight"]).unflatten(-1, (w.H, -1)).chunk(2, -1))
    weight = x["conv1d.weight"].squeeze(1)
    convolution = ConvolutionProblem("layer", B, T, D, TAPS, B, dtype, device, packed=False, activation="silu")
    mixed, _ = convolve(convolution, Convolved(torch.cat([q, k, v], -1), weight))
    q, k, v = (t.unflatten(-1, (-1, w.K)) for t in mixed.split([w.H * w.K, w.H * w.K, w.HV * w.V], -1))
    v = v.flatten(2).unflatten(-1, (w.HV, w.V))
    g = naive_gdn_gate(a, x["A_log"], x["dt_bias"], torch.promote_types(dtype, torch.float32))
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True, backend="torch")
    norm = NormProblem("layer", w.V, dtype, device, eps=EPS, activation="silu")
    o = normalize(norm, Normalized(o, x["norm.weight"], z.unflatten(-1, (w.HV, w.V))))
    return linear(o.flatten(2), x["out_proj.weight"])[:, -w.T :]


def results_of_layer(w: Workload, x: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """y, and of training the gradients of all that ``x`` has."""
    training = w.kind == "training"
    x = {name: t.detach().requires_grad_(training) for name, t in x.items()}
    y = run_layer(w, x)
    gradients = torch.autograd.grad(y, list(x.values()), dy) if training else ()
    return {"o": y.detach()} | {f"d{name}": d for name, d in zip(x, gradients, strict=False)}


def judge_layer(
    w: Workload, x: dict[str, Tensor], results: dict[str, Tensor], dy: Tensor
) -> dict[str, tuple[float, float]]:
    """Of every result its error against float64, and that of PyTorch in the layer's own dtype."""
    truth = results_of_layer(w, {name: t.double() for name, t in x.items()}, dy.double())
    reference = results_of_layer(w, x, dy)
    return {
        name: (relative_error(results[name], want), relative_error(reference[name], want))
        for name, want in truth.items()
    }
