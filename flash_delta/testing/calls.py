"""Calls of this library for workloads of a rule, prepared so that they can be repeated and timed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_delta import decode_gated_delta_rule, decode_kda, prefill_gated_delta_rule, prefill_kda
from flash_delta.testing.large import output_gradient
from flash_delta.testing.workload import Workload, activations, options


class Call(NamedTuple):
    """One library's call of a workload, in its own layouts. It may update states in place, so results are read once."""

    run: Callable[[], tuple[Tensor, Tensor | None]]  # what is timed: (o, final state), as the library returns them
    inputs: dict[str, Tensor]  # by our names; with kind "training" they are the leaves that get gradients
    state_v_first: bool = False  # its states are [N, HV, V, K]
    joined: Callable[[Any], Tensor] = lambda o: o  # makes o of what `run` returns; not timed
    finished: Callable[[Any], Any] = lambda state: state  # likewise the final state


def prepare(workload: Workload, x: dict[str, Tensor], backend: str | None = None) -> Call:
    if workload.kind == "prefill":
        return prefill(workload, x, backend)
    if workload.kind == "decode":
        return decode(workload, x)
    inputs, op, chosen = leaves(workload, x), workload.op.op, options(workload) | {"backend": backend}
    if workload.packed and not workload.on_device:
        inputs["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    return Call(lambda: op(**inputs, **chosen), inputs)


def decode(workload: Workload, x: dict[str, Tensor], **around: Any) -> Call:
    """Decoding in place. The states after each token of a draft go to slots of their own, to which trees go back."""
    op = decode_kda if workload.member == "kda" else decode_gated_delta_rule
    inputs, chosen = without_state(x), activations(workload) | around
    pool, read = state_pool(x)
    write, states = read, pool
    if workload.T > 1:
        pool, read, write, states = draft_pool(workload, x)
    if workload.tree:
        chosen["parent_idx"] = write.new_tensor([workload.parents] * workload.N)

    def run() -> tuple[Tensor, Tensor | None]:
        o = op(**inputs, state_pool=pool, read_indices=read, write_indices=write, state_v_first=True, **chosen)
        return o, states

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)


def prefill(workload: Workload, x: dict[str, Tensor], backend: str | None = None, **around: Any) -> Call:
    """Prefill that reads some slots and writes others, so that all calls start from the same states."""
    op = prefill_kda if workload.member == "kda" else prefill_gated_delta_rule
    inputs, chosen = without_state(x), activations(workload) | around
    chosen |= {"batch_invariant": workload.batch_invariant, "backend": backend}
    count = workload.T // workload.checkpoint_every if workload.checkpoint_every else 0
    pool, read, write, states = pool_of(x, count + 1)
    if 1 in workload.lengths:  # a server knows this number
        chosen["max_prompts"] = len(workload.lengths) - workload.lengths.count(1)
    if count:
        chosen |= {"checkpoint_every": workload.checkpoint_every, "checkpoint_indices": write[:, :count]}
    last = write[:, count].contiguous()

    def run() -> tuple[Tensor, Tensor | None]:
        o = op(**inputs, state_pool=pool, read_indices=read, write_indices=last, state_v_first=True, **chosen)
        return o, states

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True)


def leaves(workload: Workload, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """New tensors on the storage of ``x``. With kind "training" every float tensor is a leaf that gets a gradient."""
    training = workload.kind == "training"
    return {name: t.detach().requires_grad_(training and t.is_floating_point()) for name, t in x.items()}


def without_state(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in x.items() if name != "initial_state"}


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


def names_of_leaves(call: Call) -> list[str]:
    return [name for name, t in call.inputs.items() if t.requires_grad]


def timed(workload: Workload, call: Call, x: dict[str, Tensor]) -> Callable[[], tuple[Tensor | None, ...]]:
    """What the clock runs over: the call, in training with its backward; (o, final state, gradients...)."""
    if workload.kind != "training":
        return call.run
    wanted, do = [call.inputs[name] for name in names_of_leaves(call)], output_gradient(x)

    def run() -> tuple[Tensor | None, ...]:
        o, state = call.run()
        return (o, state, *torch.autograd.grad(o, wanted, do.view(o.shape)))

    return run
