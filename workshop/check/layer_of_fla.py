"""A whole layer of fla around the rule, with the defaults of its classes: its tensors and its computation.

    q, k, v = silu(conv(W x))    o = rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(W_b x))

Each of q, k and v has its own W and convolution. Gated DeltaNet: a = W_a x, y = W_o (RMSNorm(o) silu(W_g x)). Kimi
Delta Attention: a = F_1 F_0 x, y = W_o (RMSNorm(o) sigmoid(G_1 G_0 x + c)). Names and shapes are those of fla's layers,
which contestants run.
"""

from torch import Tensor
from torch.nn.functional import linear

from flash_delta.problem import ConvolutionProblem, Convolved, Normalized, NormProblem
from flash_delta.reference.elementwise import convolve, normalize
from flash_delta.testing.workload import Workload
from workshop.check.drawn import TAPS, Drawn

EPS = 1e-5


def make(w: Workload, drawn: Drawn) -> dict[str, Tensor]:
    """The layer's parameters and the hidden states."""
    keys, values, channels = w.H * w.K, w.HV * w.V, w.HV * w.K
    x = {"hidden_states": drawn.hidden(w)}
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        x |= {f"{name}_proj.weight": drawn.weight(width, w.hidden), f"{name}_conv1d.weight": drawn.taps(width)}
    if w.gate == "scalar":
        x |= {"a_proj.weight": drawn.weight(w.HV, w.hidden), "g_proj.weight": drawn.weight(values, w.hidden)}
    else:
        x |= {f"{name}_proj.0.weight": drawn.weight(w.V, w.hidden) for name in "fg"}
        x |= {"f_proj.1.weight": drawn.weight(channels, w.V), "g_proj.1.weight": drawn.weight(values, w.V)}
        x["g_proj.1.bias"] = drawn.uniform(-(w.V**-0.5), w.V**-0.5, values)
    x |= drawn.gate(w.HV, w.K if w.gate == "channel" else 1)
    x |= {
        "b_proj.weight": drawn.weight(w.HV, w.hidden),
        "o_norm.weight": drawn.uniform(0.5, 1.5, w.V),
        "o_proj.weight": drawn.weight(w.hidden, values),
    }
    return x


def run(w: Workload, x: dict[str, Tensor]) -> Tensor:
    """y, in the shape of ``hidden_states``, by the torch backend."""
    hidden = x["hidden_states"]
    q, k, v = (_convolved(w, x, name) for name in "qkv")
    a, gate = (_projected(x, name, hidden) for name in ("a" if w.gate == "scalar" else "f", "g"))
    bounds = {name: x[name] for name in ("cu_seqlens",) if name in x}
    if bounds:
        bounds["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    o, _ = w.op.op(
        q.unflatten(-1, (w.H, w.K)), k.unflatten(-1, (w.H, w.K)), v.unflatten(-1, (w.HV, w.V)),
        a.unflatten(-1, (w.HV, w.K)) if w.gate == "channel" else a, linear(hidden, x["b_proj.weight"]),
        A_log=x["A_log"], dt_bias=x["dt_bias"], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, backend="torch", **bounds,
    )  # fmt: skip
    activation = "silu" if w.gate == "scalar" else "sigmoid"
    norm = NormProblem("layer", w.V, hidden.dtype, hidden.device, eps=EPS, activation=activation)
    o = normalize(norm, Normalized(o, x["o_norm.weight"], gate.unflatten(-1, (w.HV, w.V))))
    return linear(o.flatten(2), x["o_proj.weight"])


def _projected(x: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    """The projection by one matrix, or by two matrices of a low rank."""
    if f"{name}_proj.weight" in x:
        return linear(hidden, x[f"{name}_proj.weight"])
    low = linear(hidden, x[f"{name}_proj.0.weight"])
    return linear(low, x[f"{name}_proj.1.weight"], x.get(f"{name}_proj.1.bias"))


def _convolved(w: Workload, x: dict[str, Tensor], name: str) -> Tensor:
    y, weight = _projected(x, name, x["hidden_states"]), x[f"{name}_conv1d.weight"].squeeze(1)
    sizes = (*y.shape, TAPS, w.N, y.dtype, y.device)
    problem = ConvolutionProblem("layer", *sizes, packed=w.packed, activation="silu")
    return convolve(problem, Convolved(y, weight, None, None, x.get("cu_seqlens")))[0]
