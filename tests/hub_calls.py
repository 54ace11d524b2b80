"""One call of everything that the package of ``make hub`` exports, forward and backward, by whoever's functions."""

from functools import partial
from types import SimpleNamespace

import torch


def calls(functions, layers):
    """By name the results and gradients of the functions, and those of the layers' forwards, which take ``self``."""
    norm = SimpleNamespace(weight=torch.linspace(0.5, 2, 16), variance_epsilon=1e-5, activation="silu")
    forwards = {name: partial(forward, norm) for name, forward in layers.items()}
    functions = functions | {"RMSNormGated": functions["RMSNormGated"](16)}
    found = {}
    for kind, members in (("function", functions), ("layer", forwards)):
        for name, call in members.items():
            torch.manual_seed(0)
            found[f"{kind} {name}"] = around(name, call) if name in AROUND else rule(name, call)
    return found


def rule(name, call):
    q, k, v, beta = (
        torch.randn(1, 70, 2, 16),
        torch.randn(1, 70, 2, 16),
        torch.randn(1, 70, 2, 16),
        torch.rand(1, 70, 2),
    )
    g = -torch.rand_like(k if "kda" in name else beta)
    inputs = [t.requires_grad_() for t in (q, k, v, g, beta)]
    o, state = call(q, k, v, g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return [o, state, *torch.autograd.grad((o * torch.randn_like(o)).sum() + state.sum(), inputs)]


def around(name, call):
    x, weight, bias = (
        t.requires_grad_() for t in (torch.randn(2, 16, AROUND[name]), torch.randn(16, 4), torch.randn(16))
    )
    inputs = [x, weight, bias]
    if name == "RMSNormGated":
        inputs = [x, torch.randn_like(x).requires_grad_()]
        y, state = call(*inputs), None
    elif name == "causal_conv1d_update":
        state = torch.randn(2, 16, 4)
        y = call(x, state, weight, bias, "silu")
    else:
        y, state = call(x, weight, bias, "silu"), None
    return [y, state, *torch.autograd.grad((y * torch.randn_like(y)).sum(), inputs)]


AROUND = {"causal_conv1d_fn": 12, "causal_conv1d_update": 1, "RMSNormGated": 16}  # and their last axis
