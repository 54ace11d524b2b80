"""What the plugins for engines call on layers of a model. No kernel depends on ``count``, the tokens of a call."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_delta.integrations.sglang import calls as sglang
from flash_delta.integrations.vllm.calls import Layer, Tokens, calls_of
from flash_delta.integrations.vllm.warmup import batches, caches
from flash_delta.ops.serving import Convolution, Ring, commit
from flash_delta.ops.serving.warmup import compile_call
from flash_delta.packs.model import Model

TAPS, DRAFTS, EPS = 4, 3, 1e-6
ROOMS = DRAFTS, 8  # records of a page: few are held in registers


def call_vllm(model: Model, H: int, HV: int, states: torch.dtype, count: int) -> None:
    """What the plugin for vLLM calls for rows, drafts and prompts. With drafts a block has more inputs."""
    D, gates = 2 * H * model.K + HV * model.V, (HV, model.K) if model.rule == "kda" else (HV,)
    tokens = _tokens_of(model, H, HV, torch.zeros(count, D, dtype=torch.bfloat16), gates)
    for drafts in (0, DRAFTS):
        shapes, dtypes = ((TAPS - 1 + drafts, D), (HV, model.V, model.K)), (torch.bfloat16, states)
        module = SimpleNamespace(
            get_state_shape=partial(tuple, shapes), get_state_dtype=partial(tuple, dtypes), num_spec=drafts,
            cache_config=None, A_log=torch.zeros(HV),
        )  # fmt: skip
        inputs, pool = caches(module)
        inputs = inputs.transpose(-1, -2)
        convolution = Convolution(inputs, torch.zeros(D, TAPS, dtype=torch.bfloat16), rolling=drafts > 0)
        options = _raw(model, HV, gates) | {
            "state_pool": pool, "state_v_first": True, "null_slot": 0, "use_qk_l2norm_in_kernel": True,
            "convolution": convolution,
        }  # fmt: skip
        norm = SimpleNamespace(weight=torch.zeros(model.V), eps=EPS, activation="silu")
        for layer in (Layer(model.rule, options, norm), Layer(model.rule, options, None)):
            x = tokens if layer.norm else tokens._replace(gate=None)
            for batch in batches(module, x):
                for op, arguments in calls_of(layer, x.first(batch.num_actual_tokens), batch)[0]:
                    compile_call(op, arguments)


def _raw(model: Model, HV: int, gates: tuple[int, ...]) -> dict[str, Any]:
    vectors = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(gates).flatten()}
    return vectors | {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": model.doubled,
    }  # fmt: skip


def _tokens_of(model: Model, H: int, HV: int, mixed: Tensor, gates: tuple[int, ...]) -> Tokens:
    K, V, n = model.K, model.V, len(mixed)
    q, k, v = mixed.split([H * K, H * K, HV * V], 1)
    g, beta = torch.zeros(n, *gates, dtype=torch.bfloat16), torch.zeros(n, HV, dtype=torch.bfloat16)
    gate, out = torch.zeros(2, n, HV, V, dtype=torch.bfloat16)
    return Tokens(q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), g, beta, gate, out)


def call_sglang(model: Model, H: int, HV: int, states: torch.dtype, count: int) -> None:
    """What the plugin for SGLang calls: rows whose q, k and v are in one tensor or not, prompts, and drafts, which
    leave states or records."""
    gates = (HV, model.K) if model.rule == "kda" else (HV,)
    mixed = torch.zeros(count, 2 * H * model.K + HV * model.V, dtype=torch.bfloat16)
    x = _tokens_of(model, H, HV, mixed, gates).each(lambda t: t[None])
    pool, rows = torch.zeros(2, HV, model.V, model.K, dtype=states), torch.zeros(count, dtype=torch.int32)
    vectors = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(gates).flatten()}
    own = vectors | {"ssm_states": pool, "cache_indices": rows}
    few = own | {"cache_indices": rows[:2], "query_start_loc": torch.tensor([0, DRAFTS, count], dtype=torch.int32)}
    a, b = x.g[0].flatten(1), x.beta[0]
    drafts = {
        "intermediate_states_buffer": torch.zeros(2, DRAFTS, HV, model.V, model.K, dtype=states),
        "intermediate_state_indices": rows[:2], "cache_steps": DRAFTS,
    }  # fmt: skip
    prompt = {name: value for name, value in few.items() if name not in vectors}
    given = model.rule, x.q, x.k, x.v
    verify = partial(
        sglang.target_verify, model.rule, *vectors.values(), *given[1:], a, b, **prompt, retrieve_parent_token=None
    )
    rings = [_ring(model, H, HV, room, rows[:2]) for room in ROOMS]
    no_buffer = dict.fromkeys(drafts) | {"cache_steps": DRAFTS}
    for call in (
        sglang.packed_decode(model.rule, mixed, a, b, **own, scale=model.K**-0.5, num_v_heads=HV, head_v_dim=model.V),
        sglang.decode(*given, a, b, **own),
        verify(**drafts),
        *(verify(**no_buffer, ring=r._replace(k=r.k[0], u=r.u[0], decay=r.decay[0])) for r in rings),
        sglang.extend(*given, x.g.float(), x.beta.float(), **prompt),
        sglang.extend(*given, x.g, x.beta, **few, beta_is_raw=True),
    ):
        compile_call(call.op, call.arguments)
    for r in rings:
        for kept in ((), (rows[:2].long(), rows[:2].long())):  # what the radix cache keeps
            accepted = r._replace(write=None, read=r.write, counts=rows[:2])
            commit(torch.stack([pool, pool]), accepted, rows[:2], *kept, state_v_first=True)


def _ring(model: Model, H: int, HV: int, room: int, rows: Tensor) -> Ring:
    """Records of two layers. Gated DeltaNet has a page for each request, which SGLang counts in 64 bits."""
    of_channels = model.rule == "kda"
    widths = (H, model.K), (HV, model.V), (HV, model.K) if of_channels else (HV,)
    records = [torch.zeros(2, 2, room, *width) for width in widths]
    return Ring(*records, write=rows if of_channels else rows.long())
