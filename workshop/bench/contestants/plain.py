"""This library again, with plain calls: the contestant that serving rows are compared with.

Its calls lack the row's option. It decodes a draft token by token. It splits decoding rows from prompts by itself. It
calls convolution, rule and norm one after the other.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flash_delta import chunk_gated_delta_rule, decode_gated_delta_rule, decode_kda, prefill_gated_delta_rule
from flash_delta.testing import Workload, activations
from flash_delta.testing.calls import Call, draft_pool, pool_of, without_state
from workshop.bench.contestants import flash_delta, separate

PACKAGE = flash_delta.PACKAGE
CACHES = flash_delta.CACHES
TOKENS = ("q", "k", "v", "g", "beta")


def unsupported(workload: Workload, device: torch.device) -> str | None:
    return flash_delta.unsupported(workload, device)


def prepare(workload: Workload, x: dict[str, Tensor]) -> Call:
    if workload.around:
        return (_step_in_several_calls if workload.kind == "decode" else _in_several_calls)(workload, x)
    if workload.kind == "decode":
        return _single_tokens(workload, x)
    if workload.batch_invariant or workload.checkpoint_every:
        return flash_delta.prepare(replace(workload, batch_invariant=False, checkpoint_every=0), x)
    return _apart(workload, x)


def _in_several_calls(workload: Workload, x: dict[str, Tensor]) -> Call:
    bounds = {"cu_seqlens": x["cu_seqlens"], "cu_seqlens_cpu": x["cu_seqlens"].cpu()}

    def rule(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        given = {"initial_state": first, "output_final_state": True, **bounds, **activations(workload)}
        return chunk_gated_delta_rule(q, k, v, x["g"], x["beta"], **given)

    return separate.prepare(workload, x, rule, state_v_first=False)


def _step_in_several_calls(workload: Workload, x: dict[str, Tensor]) -> Call:
    op = decode_kda if workload.member == "kda" else decode_gated_delta_rule
    given = {name: x[name] for name in ("g", "beta", "A_log", "dt_bias")} | activations(workload)

    def step(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        return op(q, k, v, state_pool=pool, read_indices=slots, write_indices=slots, state_v_first=True, **given)

    return separate.prepare_step(workload, x, step)


def _single_tokens(workload: Workload, x: dict[str, Tensor]) -> Call:
    """Decodes token t of every draft in one call. If drafts differ in length, the drafts that have a token t are
    gathered first."""
    inputs, chosen = without_state(x), activations(workload)
    pool, read, write, states = draft_pool(workload, x)
    bounds, calls, places = inputs.pop("cu_seqlens", None), [], []
    for t, parent in enumerate(workload.parents):
        rows, before = write[:, t] >= 0, read if parent < 0 else write[:, parent]
        call = {"read_indices": before[rows], "write_indices": write[rows, t]}
        if bounds is None:
            call |= {name: inputs[name][:, t : t + 1] for name in TOKENS}
        else:
            places.append(bounds[:-1][rows].long() + t)
            call |= {name: inputs[name][0, places[-1]].unsqueeze(1) for name in TOKENS}
        calls.append(inputs | call)

    def run() -> tuple[list[Tensor], Tensor | None]:
        o = [decode_gated_delta_rule(**call, state_pool=pool, state_v_first=True, **chosen) for call in calls]
        return o, states

    def joined(o: list[Tensor]) -> Tensor:
        return torch.cat(o, 1) if bounds is None else torch.cat(o)[torch.cat(places).argsort()].transpose(0, 1)

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True, joined=joined)


def _apart(workload: Workload, x: dict[str, Tensor]) -> Call:
    """Decoding and prefill in two calls. The sequences of one token come first."""
    rows, inputs, chosen = workload.lengths.count(1), without_state(x), activations(workload)
    pool, read, write, states = pool_of(x, 1)
    decoded = {name: inputs[name][0, :rows].unsqueeze(1) for name in TOKENS}  # [rows, 1, ...]
    decoded |= {"read_indices": read[:rows], "write_indices": write[:rows, 0]}
    prompts = {name: inputs[name][:, rows:] for name in TOKENS}
    prompts |= {"read_indices": read[rows:], "write_indices": write[rows:, 0]}
    prompts["cu_seqlens"] = inputs["cu_seqlens"][rows:] - rows
    chosen |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "state_pool": pool, "state_v_first": True}

    def run() -> tuple[list[Tensor], Tensor | None]:
        return [decode_gated_delta_rule(**decoded, **chosen), prefill_gated_delta_rule(**prompts, **chosen)], states

    def joined(o: list[Tensor]) -> Tensor:
        return torch.cat([o[0].transpose(0, 1), o[1]], 1)

    return Call(run, inputs | {"initial_state": pool}, state_v_first=True, joined=joined)
