"""What training and serving a model calls.

Layers of this library, of transformers under `enable`, and the plugins for engines call the ops in ways of their own,
with views of one projection and caches of several layouts. So a pack is made from the calls of each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import flash_delta
from flash_delta.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, MixerState
from flash_delta.packs.engines import call_sglang, call_vllm
from flash_delta.packs.model import MODELS, Model

HIDDEN, TOKENS = 64, 69  # no length compiles kernels


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
            yield partial(call_vllm, model, H, HV, dtype, TOKENS)
            yield partial(call_sglang, model, H, HV, dtype, TOKENS)


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
