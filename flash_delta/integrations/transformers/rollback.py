"""Caches of transformers that can be rolled back, as assisted generation and prompt lookup do after rejected drafts.

A cache that records its past keeps the inputs of convolutions until the next crop. transformers' crop leaves recurrent
states as they are. So its models with such states refuse drafts. Here layers whose source is known also keep the last
arguments of their op (:class:`flash_delta.layers.state.Replay`), and a crop computes the state from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from inspect import isclass, unwrap
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_delta.layers.state import KEPT, Replay


def of_caches() -> Iterator[tuple[type, str, Any]]:
    """Yields what is replaced in transformers' caches: where, which name, by what."""
    layer = import_module("transformers.cache_utils").LinearAttentionCacheLayerMixin
    yield layer, "crop", _cropping(getattr(layer.crop, "of_convolutions", layer.crop))
    yield layer, "is_croppable", _croppable(getattr(layer.is_croppable.fget, "of_convolutions", layer.is_croppable))


def of_models(module: ModuleType) -> Iterator[tuple[type, str, bool]]:
    """Yields the same for the classes of models by which `generate` refuses drafts.

    In transformers' code GLM-5-Next's attention chooses other keys for several tokens than for one. Qwen4-Exp's reads
    the positions of all tokens, and 5.17 keeps them where no crop reaches them. Drafts would change the text of both.
    """
    family = module.__name__.rpartition("modeling_")[2]
    attention = import_module("transformers.cache_utils").DynamicIndexedLayer()
    if family == "glm5_next" or (family == "qwen4_exp" and not hasattr(attention, "indexer_position_ids")):
        return
    for cls in vars(module).values():
        if isclass(cls) and cls.__module__ == module.__name__ and "_is_stateful" in vars(cls):
            yield cls, "_is_stateful", False


def shifts_window(forward: Callable[..., Tensor]) -> bool:
    """Whether a layer's forward drops an input of the convolution for each single token, also where the past is
    recorded."""
    return {"is_recording_past", "record_past"}.isdisjoint(unwrap(forward).__code__.co_names)


def record(forward: Callable[..., Tensor], module: nn.Module, given: dict[str, Any], layer: Any) -> Tensor:
    """The layer's forward on ``given`` arguments. ``layer`` of the cache keeps what a crop needs of the last tokens."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if given.get(name) is not None:
            raise ValueError(f"{name}: expected None with a cache that records its past, got a tensor")
    x, mask, replay = given["hidden_states"], given.get("attention_mask"), _replay_of(layer) or Replay()
    if x.shape[1] in (1, KEPT + 1) and layer.has_previous_state[0] and shifts_window(forward):
        layer.conv_states[0] = F.pad(layer.conv_states[0], (1, 0))  # which is dropped in place of an input
    if x.shape[1] > KEPT:
        first, last = (
            given | {"hidden_states": x[:, part], "attention_mask": mask if mask is None else mask[:, part]}
            for part in (slice(0, -KEPT), slice(-KEPT, None))
        )
        y = forward(module, **first)
        layer.conv_states[0] = layer.conv_states[0][..., -layer.conv_kernel_size[0] :].clone()
        return torch.cat([y, record(forward, module, last, layer)], dim=1)
    y = forward(module, **given, replay=replay)
    layer.conv_states[0] = layer.conv_states[0][..., -replay.length - layer.conv_kernel_size[0] :]
    layer.replay, replay.window = replay, layer.conv_states[0]
    return y


def _replay_of(layer: Any) -> Replay | None:
    """What the layer of a cache has kept, if its states are still those after the kept tokens."""
    replay = vars(layer).get("replay")
    current = replay is not None and layer.has_previous_state[0] and replay.window is layer.conv_states[0]
    return replay if current else None


@cache
def _cropping(crop: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @wraps(crop)
    def crop_states(self, tokens_to_remove):
        replay, tokens = _replay_of(self), int(tokens_to_remove)
        recurrent = [i for i, has_one in self.is_recurrent_states_initialized.items() if has_one]
        if self.record_past and tokens < 0 and recurrent:
            kept = 0 if replay is None or recurrent != [0] else replay.length
            if tokens < -kept:
                kept = f"{-kept} to 0 (so many are kept since the last crop)"
                raise ValueError(f"tokens_to_remove: expected {kept}, got {tokens}")
            _, state = replay.after(kept + tokens)
            self.recurrent_states[0].copy_(torch.zeros(()) if state is None else state)
        crop(self, tokens_to_remove)
        self.replay = None

    crop_states.of_convolutions = crop
    return crop_states


@cache
def _croppable(old: property) -> property:
    def is_croppable(self) -> bool:
        if any(self.is_recurrent_states_initialized.values()):
            return self.record_past and _replay_of(self) is not None
        return old.fget(self)

    is_croppable.of_convolutions = old
    return property(is_croppable, doc=old.__doc__)
