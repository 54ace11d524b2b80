"""Conversions of tensors that several contestants share."""

import torch
from torch import Tensor

from flash_delta import naive_gdn_gate, naive_kda_gate, naive_kda_lowerbound_gate
from flash_delta.testing import Workload


def leaves(workload: Workload, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """New tensors on the storage of ``x``. With kind "training" every float tensor is a leaf that gets a gradient."""
    training = workload.kind == "training"
    return {name: t.detach().requires_grad_(training and t.is_floating_point()) for name, t in x.items()}


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


def state_pool(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A pool ``[N, HV, V, K]`` of the rows' states, and the slot of each row ``[N]``."""
    pool = x["initial_state"].mT.contiguous()
    return pool, torch.arange(len(pool), device=pool.device, dtype=torch.int32)


def pool_of(x: dict[str, Tensor], states: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A pool for the rows' states, and its slots.

    Returns the pool, which has ``states`` free slots for each row after the rows' own; the slots that rows read
    ``[N]``; the slots that they write ``[N, states]``; and the states in the last of these, ``[N, HV, V, K]``.
    """
    given = x["initial_state"].mT
    N = len(given)
    pool = given.new_empty(N * (1 + states), *given.shape[1:])
    pool[:N] = given
    slots = torch.arange(len(pool), device=pool.device, dtype=torch.int32).view(1 + states, N)
    return pool, slots[0], slots[1:].mT.contiguous(), pool[-N:]


def draft_pool(workload: Workload, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of `pool_of` for drafts, whose tokens have a state each. A shorter draft leaves its last
    state in the same slot. The columns that it does not need are -1."""
    pool, read, write, states = pool_of(x, workload.T)
    for row, length in zip(write, workload.lengths, strict=False):  # there may be no lengths
        row.copy_(torch.cat([row[workload.T - length :], row.new_full((workload.T - length,), -1)]))
    return pool, read, write, states
