"""Large problems are judged on some of their heads, over all tokens and sequences.

Heads are independent, so only the first and the last key head, with their value heads, are judged. The truth is the
torch backend in float64. ``flash-delta check`` shows that it is within 1e-10 of the token-by-token recurrence. The
recurrence itself would need every token's state for the gradients.
"""

from typing import Any

import torch
from torch import Tensor

from flash_delta.testing.accuracy import products_in, relative_error
from flash_delta.testing.workload import Workload, options

TOKENS = dict.fromkeys(("q", "k", "p", "v", "g", "beta", "b", "w", "o"), 2)
AXES = TOKENS | {"initial_state": 1, "final_state": 1, "A_log": 0}  # of heads


def some_heads(workload: Workload, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The judged heads of tensors, which have the names of arguments or results. Tensors without heads are kept
    whole."""
    group = workload.HV // workload.H
    keys = sorted({0, workload.H - 1})
    values = [h * group + i for h in keys for i in range(group)]
    taken = {}
    for name, t in tensors.items():
        if name == "dt_bias":
            taken[name] = t.view(workload.HV, -1)[values].flatten()
        elif name in AXES:
            heads = keys if name in ("q", "k", "p") else values
            taken[name] = t.index_select(AXES[name], torch.tensor(heads, device=t.device))
        else:
            taken[name] = t
    return taken


def output_gradient(x: dict[str, Tensor]) -> Tensor:
    """The gradient do for workloads with a backward pass."""
    o = output_like(x)
    do = torch.randn(o.shape, generator=torch.Generator(o.device).manual_seed(1), device=o.device).to(o.dtype)
    return without_padding(x, do)


def without_padding(x: dict[str, Tensor], o: Tensor) -> Tensor:
    """``o`` with zeros in place of padding, where layers may write anything."""
    return o.where(x["attention_mask"][..., None].bool(), 0) if "attention_mask" in x else o


def output_like(x: dict[str, Tensor]) -> Tensor:
    """An input with the output's shape and dtype: the values (of one update of each token), or a layer's input."""
    if "hidden_states" in x:
        return x["hidden_states"]
    return x["v"][:, :: x["v"].shape[1] // x["q"].shape[1]]


def judge(workload: Workload, x: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Returns for each result (o, final_state, dq, ...) its error, and the torch backend's with products in the same
    dtype."""
    heads = some_heads(workload, x)
    do = some_heads(workload, {"o": output_gradient(x)})["o"]
    wide = {name: t.double() if t.is_floating_point() else t for name, t in heads.items()}
    truth = run_workload(workload, wide, do.double(), "torch")
    with products_in(getattr(torch, workload.dtype)):
        reference = run_workload(workload, heads, do, "torch")
    return {
        name: (relative_error(_some(workload, name, results[name]), want), relative_error(reference[name], want))
        for name, want in truth.items()
    }


def run_workload(workload: Workload, x: dict[str, Tensor], do: Tensor, backend: str | None) -> dict[str, Tensor]:
    """The library's own results: o, the final state if there is one, and with a backward pass the gradients of <o, do>.

    The final state has the dtype of the initial one, as states that are updated in place do.
    """
    training = workload.kind == "training"
    x = {n: t.detach().requires_grad_(training and t.is_floating_point()) for n, t in x.items()}
    call: dict[str, Any] = {**x, **options(workload), "backend": backend}
    if "cu_seqlens" in x and x["q"].device.type != "cpu":
        call["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    o, final_state = _run_trees(workload, call) if workload.tree else workload.op.op(**call)
    results = {"o": o.detach()}
    if final_state is not None:
        results["final_state"] = final_state.detach().to(x["initial_state"].dtype)
    if training:
        leaves = {name: t for name, t in x.items() if t.requires_grad}
        gradients = torch.autograd.grad(o, list(leaves.values()), do)
        results |= {f"d{name}": d for name, d in zip(leaves, gradients, strict=True)}
    return results


def _run_trees(workload: Workload, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs of trees, token by token, and the state after the last token."""
    outputs, states = [], [call["initial_state"]]  # the state after token t is the one at t + 1
    for t, parent in enumerate(workload.parents):
        token = {name: call[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o, state = workload.op.op(**call | token | {"initial_state": states[parent + 1]})
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), states[-1]


def _some(workload: Workload, name: str, t: Tensor) -> Tensor:
    argument = name if name in AXES else name.removeprefix("d")
    return some_heads(workload, {argument: t})[argument]
