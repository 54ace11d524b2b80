"""Values wider than keys: a head with V = n K is scanned as n heads, each with K of its value columns.

The columns of a state do not depend on each other. The n heads have the same keys and gates, and each computes A by
itself. Values and outputs are views with other shapes. Gates and initial states are small, and are copied.
"""

from functools import partial

import torch
from torch import Tensor

from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.problem import Inputs, Outputs, Problem


def as_heads(p: Problem, x: Inputs) -> tuple[Problem, Inputs]:
    """Returns the problem and inputs of the same call with heads of K columns. States are [N, HV n, K, K] with values
    first."""
    n = p.V // p.K
    state = x.initial_state
    if state is not None:
        state = (state if p.state_v_first else state.mT).reshape(p.N, p.HV * n, p.K, p.K)
    heads = x._replace(
        v=x.v.unflatten(3, (n, p.K)).flatten(2, 3),
        g=_repeated(x.g, n, 2),
        beta=_repeated(x.beta, n, 2),
        A_log=_repeated(x.A_log, n, 0),
        dt_bias=_repeated(x.dt_bias, n, 0),
        initial_state=state,
    )
    return p._replace(HV=p.HV * n, V=p.K, state_v_first=True, needs_grad=False), heads


def layouts_as_heads(p: Problem, x: Inputs) -> tuple[Problem, Inputs]:
    """Returns what `as_heads` returns, as layouts."""
    new = partial(torch.empty_strided, device="meta")
    p, heads = as_heads(p, x._make([None if t is None else new(t.shape, t.stride(), dtype=t.dtype) for t in x]))
    return p, layouts_of(heads)


def joined(p: Problem, out: Outputs) -> Outputs:
    """The results of the call with whole heads."""
    final = out.final_state.view(p.N, p.HV, p.V, p.K)
    return Outputs(out.o.view(p.o_shape), final if p.state_v_first else final.mT.contiguous())


def _repeated(t: Tensor | None, n: int, axis: int) -> Tensor | None:
    return None if t is None else t.repeat_interleave(n, axis)
