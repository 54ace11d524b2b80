"""A whole layer around the rule: its tensors, its computation, and how results are judged. This is Qwen3-Next's layer:

    q, k, v = silu(conv(W_qkv x))    o = rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(b))
    y = W_o (RMSNorm(o) silu(z))     with z, a and b from x, too

Names, shapes and the order of projected columns are those of transformers' layer, which contestants run. The layers of
fla are in layer_of_fla.py. Several layers are one after the other, with nothing in between.
"""

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import linear

from flash_delta import chunk_gated_delta_rule, naive_gdn_gate
from flash_delta.problem import ConvolutionProblem, Convolved, Normalized, NormProblem
from flash_delta.reference.elementwise import convolve, normalize
from flash_delta.testing.accuracy import relative_error
from flash_delta.testing.large import without_padding
from flash_delta.testing.workload import Workload
from workshop.check import layer_of_fla
from workshop.check.drawn import TAPS, Drawn

EPS = 1e-6
SEEN = 8  # tokens that each row has read before it is decoded
INPUTS = ("hidden_states", "seen", "cu_seqlens", "attention_mask")  # the others are parameters


def make_layer(w: Workload, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """The parameters and hidden states, as a freshly initialised model would have them. Of several layers, parameters'
    names begin with the layer's number."""
    if w.layers > 1:
        each = [make_layer(replace(w, layers=1), device, seed + i) for i in range(w.layers)]
        named = {f"{i}.{name}": t for i, x in enumerate(each) for name, t in x.items() if name not in INPUTS}
        return {name: t for name, t in each[0].items() if name in INPUTS} | named
    x = _make(w, Drawn(w, device, seed))
    if w.packed:
        bounds = [0, *accumulate(w.lengths or [w.T] * w.N)]
        x["cu_seqlens"] = torch.tensor(bounds, device=device, dtype=torch.int32)
    if w.padded:
        lengths, places = torch.tensor(w.lengths, device=device), torch.arange(w.T, device=device)
        x["attention_mask"] = (places < lengths[:, None]).long()
    return x


def _make(w: Workload, drawn: Drawn) -> dict[str, Tensor]:
    if w.of_fla:
        return layer_of_fla.make(w, drawn)
    keys, values = w.H * w.K, w.HV * w.V
    x = {
        "hidden_states": drawn.hidden(w),
        **drawn.gate(w.HV),
        "conv1d.weight": drawn.taps(2 * keys + values),
        "in_proj_qkvz.weight": drawn.weight(2 * keys + 2 * values, w.hidden),
        "in_proj_ba.weight": drawn.weight(2 * w.HV, w.hidden),
        "norm.weight": drawn.uniform(0.5, 1.5, w.V),
        "out_proj.weight": drawn.weight(w.hidden, values),
    }
    return x | ({"seen": drawn.normal(w.N, SEEN, w.hidden)} if w.kind == "decode" else {})


def run_layer(w: Workload, x: dict[str, Tensor]) -> Tensor:
    """y, in the shape of ``hidden_states``, by the torch backend. If rows have read tokens, it continues after
    these. What stands behind a row's end cannot change the row, so padding is computed, and its y is 0."""
    inputs = {name: t for name, t in x.items() if name in INPUTS}
    for i in range(w.layers):
        own = {name.removeprefix(f"{i}."): t for name, t in x.items() if name.startswith(f"{i}.")} or x
        inputs["hidden_states"] = (layer_of_fla.run if w.of_fla else _run)(w, own | inputs)
    return without_padding(x, inputs["hidden_states"])


def _run(w: Workload, x: dict[str, Tensor]) -> Tensor:
    """Sequences of a packed row are equally long, and so computed as batch rows."""
    given, group = x["hidden_states"].view(w.N, w.T, -1), w.HV // w.H
    hidden = torch.cat([x["seen"], given], 1) if "seen" in x else given
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
    return linear(o.flatten(2), x["out_proj.weight"])[:, -w.T :].reshape(x["hidden_states"].shape)


def results_of_layer(w: Workload, x: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """y, and for training the gradients of all float tensors of ``x``, or with frozen weights of the hidden states."""
    training = w.kind == "training"
    learns = {n for n, t in x.items() if training and t.is_floating_point() and (n == "hidden_states" or not w.frozen)}
    x = {name: t.detach().requires_grad_(name in learns) for name, t in x.items()}
    y = run_layer(w, x)
    leaves = {name: t for name, t in x.items() if t.requires_grad}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy) if training else ()
    return {"o": y.detach()} | {f"d{name}": d for name, d in zip(leaves, gradients, strict=True)}


def judge_layer(
    w: Workload, x: dict[str, Tensor], results: dict[str, Tensor], dy: Tensor
) -> dict[str, tuple[float, float]]:
    """Returns for every result its error against float64, and that of PyTorch in the layer's own dtype."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
    truth = results_of_layer(w, wide, dy.double())
    reference = results_of_layer(w, x, dy)
    return {
        name: (relative_error(results[name], want), relative_error(reference[name], want))
        for name, want in truth.items()
    }
