"""The models that packs are made for, and what training and serving them calls.

Layers of this library, of transformers under `enable`, and the plugins for engines call the ops in ways of their own,
with views of one projection and caches of several layouts. So a pack is made from the calls of each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flash_delta
from flash_delta.integrations.sglang import calls as sglang
from flash_delta.integrations.vllm.calls import Layer, Tokens, calls_of
from flash_delta.integrations.vllm.warmup import batches, caches
from flash_delta.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, MixerState
from flash_delta.ops.serving import Convolution
from flash_delta.ops.serving.warmup import compile_call

HIDDEN, TAPS, DRAFTS, EPS, TOKENS = 64, 4, 3, 1e-6, 69  # no length compiles kernels


class Model(NamedTuple):
    rule: str  # "gated_delta_rule", "kda" or "delta_rule"
    heads: tuple[tuple[int, int], ...]  # key and value heads of its sizes
    K: int
    V: int
    parts: tuple[int, ...] = (1,)  # among how many GPUs the heads may be divided
    family: str | None = None  # in transformers
    doubled: bool = False  # whether beta reaches 2
    served: bool = True  # by the plugins for engines


MODELS = {
    "Qwen3-Next": Model("gated_delta_rule", ((16, 32),), 128, 128, (1, 2, 4, 8), "qwen3_next"),
    "Qwen3.5": Model("gated_delta_rule", ((16, 32), (16, 48), (16, 64)), 128, 128, (1, 2, 4, 8), "qwen3_5"),
    "Kimi-Linear": Model("kda", ((32, 32),), 128, 128, (1, 2, 4, 8), "kimi_linear"),
    "OLMo-hybrid": Model("gated_delta_rule", ((30, 30),), 96, 192, (1, 2, 3), "olmo_hybrid", doubled=True),
    "fla-GatedDeltaNet": Model("gated_delta_rule", ((6, 6),), 256, 512, served=False),
    "fla-KimiDeltaAttention": Model("kda", ((16, 16),), 128, 128, served=False),
    "fla-DeltaNet": Model("delta_rule", ((4, 4),), 256, 256, served=False),
}
Calls = Iterator[Callable[[], Any]]


def calls_of_model(name: str, parts: tuple[int, ...]) -> Calls:
    """The calls of a model whose heads are divided among so many GPUs."""
    model = MODELS[name]
    for H, HV in model.heads:
        for part in parts:
            yield from _calls(model, H // part, HV // part)
        if 1 in parts and model.family is not None and find_spec("transformers"):
            yield from _calls_in_transformers(model, H, HV)


def _calls(model: Model, H: int, HV: int) -> Calls:
    yield from _calls_of_op(model, H, HV)
    for dtype in (torch.bfloat16, torch.float32):  # of weights; under autocast they stay float32
        yield from _calls_of_layer(_layer(model, H, HV), dtype)
    if model.served:
        for dtype in (torch.float32, torch.bfloat16):  # of states
            yield partial(_call_vllm, model, H, HV, dtype)
            yield partial(_call_sglang, model, H, HV, dtype)


def _calls_of_op(model: Model, H: int, HV: int) -> Calls:
    """The op with tensors of its own, as in other people's layers: log decays in float32, or raw gates."""
    op = getattr(flash_delta, f"chunk_{model.rule}")
    sizes = {"q": (H, model.K), "k": (H, model.K), "v": (HV, model.V), "beta": (HV,)}
    x = {name: torch.zeros(2, TOKENS, *size, dtype=torch.bfloat16) for name, size in sizes.items()}
    channels = (model.K,) if model.rule == "kda" else ()
    vectors = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV, *channels).flatten()}
    if model.rule != "delta_rule":
        x |= {"g": torch.zeros(2, TOKENS, HV, *channels)}

    def call(x: dict[str, Tensor], **options: Any) -> None:
        options |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        with torch.no_grad():
            _, state = op(**x, **options)
            op(**x, initial_state=state, **options)
        given = [t.requires_grad_() for t in x.values()]
        torch.autograd.grad(op(**x, **options)[0].sum(), given)

    def calls(x: dict[str, Tensor], **options: Any) -> None:
        for doubled in {None, model.doubled}:
            call(x, allow_neg_eigval=doubled, **options)
            if "g" in x:
                raw = x | vectors | {"g": x["g"].detach().bfloat16()}
                call(raw, use_gate_in_kernel=True, allow_neg_eigval=doubled, **options)

    yield lambda: calls(x)
    row = {name: _in_a_row(t.detach()) for name, t in x.items()}
    yield lambda: calls(row, cu_seqlens=_bounds(row["q"]))


def _in_a_row(x: Tensor) -> Tensor:
    """Two sequences as one row."""
    return x.flatten(0, 1)[None]


def _bounds(row: Tensor) -> Tensor:
    return torch.tensor([0, row.shape[1] // 2, row.shape[1]], dtype=torch.int32)


def _layer(model: Model, H: int, HV: int) -> nn.Module:
    sizes = {"head_dim": model.K, "num_heads": H}
    if model.rule == "gated_delta_rule":
        more = {"expand_v": model.V / model.K, "num_v_heads": HV, "allow_neg_eigval": model.doubled}
        return GatedDeltaNet(HIDDEN, **sizes, **more)
    if model.rule == "kda":
        return KimiDeltaAttention(HIDDEN, **sizes)
    return DeltaNet(hidden_size=H * model.K, num_heads=H)


def _calls_of_layer(layer: nn.Module, weights: torch.dtype) -> Calls:
    """A training step, a prompt and the token after it; batched and packed."""
    layer = layer.bfloat16()
    for name, module in layer.named_modules():
        if name.endswith(("conv1d", "norm")):
            module.to(weights)
    x = torch.zeros(2, TOKENS, layer.hidden_size, dtype=torch.bfloat16)
    row = _in_a_row(x)
    yield lambda: layer(x).sum().backward()
    yield lambda: layer(row, cu_seqlens=_bounds(row)).sum().backward()
    yield lambda: _generate(layer, x)
    yield lambda: _generate(layer, row, cu_seqlens=_bounds(row))


@torch.no_grad()
def _generate(layer: nn.Module, x: Tensor, **packing: Tensor) -> None:
    layer.eval()
    layer(x, **packing)
    layer(x, state=(state := MixerState()), **packing)
    if not packing:
        layer(x[:, :1], state=state)
        layer(x, state=state)
    layer.train()


def _calls_in_transformers(model: Model, H: int, HV: int) -> Calls:
    """Yields the same calls of transformers' own layer under `enable`."""
    from transformers import AutoConfig, DynamicCache

    from flash_delta.integrations.transformers import enable

    config = AutoConfig.for_model(model.family)
    config = getattr(config, "text_config", config)
    own = {
        "hidden_size": HIDDEN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": H, "linear_num_value_heads": HV, "linear_num_heads": H,
        "linear_key_head_dim": model.K, "linear_value_head_dim": model.V, "linear_head_dim": model.K,
    }  # fmt: skip
    for name, value in own.items():
        setattr(config, name, value)
    modelling = import_module(f"transformers.models.{model.family}.modeling_{model.family}")
    (of_family,) = [c for name, c in vars(modelling).items() if name.endswith(("GatedDeltaNet", "DeltaAttention"))]
    layer = of_family(config, 0).bfloat16()
    x = torch.zeros(2, TOKENS, HIDDEN, dtype=torch.bfloat16)
    row = _in_a_row(x)
    numbers = (torch.arange(row.shape[1]) >= row.shape[1] // 2).int()[None]
    packing = {"cu_seq_lens_q": _bounds(row), "seq_idx": numbers}

    def train(x: Tensor, **packing: Tensor) -> None:
        with enable():
            layer(x, **packing).sum().backward()

    @torch.no_grad()
    def generate(x: Tensor, **packing: Tensor) -> None:
        with enable():
            layer(x, **packing)
            layer(x, cache_params=(cache := DynamicCache(config=config)), **packing)
            if not packing:
                layer(x[:, :1], cache_params=cache)

    yield from (partial(train, x), partial(train, row, **packing))
    yield from (partial(generate, x), partial(generate, x[:1]), partial(generate, row, **packing))


def _call_vllm(model: Model, H: int, HV: int, states: torch.dtype) -> None:
    """What the plugin for vLLM calls for rows, drafts and prompts. With drafts a block has more inputs."""
    D, gates = 2 * H * model.K + HV * model.V, (HV, model.K) if model.rule == "kda" else (HV,)
    tokens = _tokens_of(model, H, HV, torch.zeros(TOKENS, D, dtype=torch.bfloat16), gates)
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


def _call_sglang(model: Model, H: int, HV: int, states: torch.dtype) -> None:
    """What the plugin for SGLang calls: rows whose q, k and v are in one tensor or not, drafts, and prompts."""
    gates = (HV, model.K) if model.rule == "kda" else (HV,)
    mixed = torch.zeros(TOKENS, 2 * H * model.K + HV * model.V, dtype=torch.bfloat16)
    x = _tokens_of(model, H, HV, mixed, gates).each(lambda t: t[None])
    pool, rows = torch.zeros(2, HV, model.V, model.K, dtype=states), torch.zeros(TOKENS, dtype=torch.int32)
    vectors = {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(gates).flatten()}
    own = vectors | {"ssm_states": pool, "cache_indices": rows}
    few = own | {"cache_indices": rows[:2], "query_start_loc": torch.tensor([0, DRAFTS, TOKENS], dtype=torch.int32)}
    a, b = x.g[0].flatten(1), x.beta[0]
    drafts = {
        "intermediate_states_buffer": torch.zeros(2, DRAFTS, HV, model.V, model.K, dtype=states),
        "intermediate_state_indices": rows[:2], "cache_steps": DRAFTS,
    }  # fmt: skip
    prompt = {name: value for name, value in few.items() if name not in vectors}
    given = model.rule, x.q, x.k, x.v
    for call in (
        sglang.packed_decode(model.rule, mixed, a, b, **own, scale=model.K**-0.5, num_v_heads=HV, head_v_dim=model.V),
        sglang.decode(*given, a, b, **own),
        sglang.target_verify(
            model.rule, *vectors.values(), *given[1:], a, b, **prompt, **drafts, retrieve_parent_token=None
        ),
        sglang.extend(*given, x.g.float(), x.beta.float(), **prompt),
        sglang.extend(*given, x.g, x.beta, **few, beta_is_raw=True),
    ):
        compile_call(call.op, call.arguments)
