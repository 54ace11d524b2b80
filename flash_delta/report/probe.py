"""Measures the states of a trained model while it reads a text: how fast they decay, and what they hold at the end."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flash_delta.layers._delta_mixer import DeltaMixer, ScalarGateMixer
from flash_delta.models import FlashDeltaCache
from flash_delta.ops import fused_gdn_gate, fused_kda_gate


@dataclass(frozen=True)
class Decay:
    """Half-lives in tokens. After ln 2 / |mean g| tokens, half of a state is left if nothing is erased."""

    layer: int
    half_life: Tensor  # [HV], or [HV, K] if every key channel has its own decay
    token_range: Tensor  # [2, HV] or [2, HV, K]: ln 2 / |g_t| at the 10th and 90th percentile of the tokens


@dataclass(frozen=True)
class Probe:
    decays: list[Decay]
    states: dict[int, Tensor]  # by layer: [HV, K, V] after the last token


@torch.no_grad()
def probe(model: PreTrainedModel, tokens: Tensor) -> Probe:
    """Lets the model read tokens [T] once."""
    model.eval()
    mixers = {i: layer.mixer for i, layer in enumerate(model.model.layers)}
    linear = {i: mixer for i, mixer in mixers.items() if isinstance(mixer, DeltaMixer)}
    raw: dict[int, Tensor] = {}
    cache = FlashDeltaCache(model.config)
    hooks = [_gate_projection(mixer).register_forward_hook(_keep(raw, i)) for i, mixer in linear.items()]
    try:
        model(input_ids=tokens[None].long().to(model.device), cache=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    decays = [_decay(i, _log_decay(mixer, raw[i])) for i, mixer in linear.items()]
    return Probe(decays, {i: cache.layers[i].recurrent[0].float().cpu() for i in linear})


def _gate_projection(mixer: nn.Module) -> nn.Module:
    return mixer.a_proj if isinstance(mixer, ScalarGateMixer) else mixer.f_proj


def _keep(into: dict[int, Tensor], layer: int):
    return lambda module, inputs, output: into.__setitem__(layer, output)


def _log_decay(mixer: nn.Module, raw: Tensor) -> Tensor:
    """The log decay [T, HV] or [T, HV, K] from the raw gate [1, T, ...]."""
    if isinstance(mixer, ScalarGateMixer):
        return fused_gdn_gate(raw, mixer.A_log, mixer.dt_bias)[0]
    raw = raw.unflatten(-1, (len(mixer.A_log), -1))
    return fused_kda_gate(raw, mixer.A_log, mixer.dt_bias, lower_bound=mixer.lower_bound)[0]


def _decay(layer: int, g: Tensor) -> Decay:
    speed = -g.float().cpu()
    tokens = math.log(2) / speed.quantile(torch.tensor([0.9, 0.1]), dim=0)
    return Decay(layer, math.log(2) / speed.mean(dim=0), tokens)
