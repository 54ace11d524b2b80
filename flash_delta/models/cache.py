"""The states of a FlashDelta model between calls, as a cache for `generate` of transformers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from flash_delta.layers import AttentionState, MixerState
from flash_delta.models.configuration import FlashDeltaConfig


class FlashDeltaCache(Cache):
    """One state per layer: `MixerState` (`.conv`, `.recurrent`) or, for softmax attention, `AttentionState`.

    After `activate_past_recording()` the last tokens can be taken back by `crop`, as assisted generation and prompt
    lookup do.

    Args:
        config: the model's configuration; it says which layer needs which state.

    Example:
        >>> import torch
        >>> from flash_delta.models import FlashDeltaCache, FlashDeltaConfig, FlashDeltaModel
        >>> config = FlashDeltaConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16, attention_every=2,
        ...     num_attention_heads=4,
        ... )
        >>> cache = FlashDeltaCache(config)
        >>> out = FlashDeltaModel(config).eval()(torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
        >>> cache.get_seq_length()
        3
    """

    is_compileable = False

    def __init__(self, config: FlashDeltaConfig) -> None:
        super().__init__(layers=[AttentionState() if name == "attention" else MixerState() for name in config.mixers])
        self.seen_tokens = 0

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state of at least one token."""
        return self.seen_tokens > 0

    @property
    def batch_size(self) -> int:
        """The number of sequences, or -1 before the first token."""
        first = self.layers[0]
        state = first.recurrent if isinstance(first, MixerState) else first.keys
        return -1 if state is None else state.shape[0]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state of at least one token, which is the same for every layer."""
        return self.is_initialized

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, with padding. It is the same in every layer."""
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, because no layer has a maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys visible to the next query_length tokens, index of the first)."""
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self.layers = [
            AttentionState() if isinstance(layer, AttentionState) else MixerState(record_past=layer.record_past)
            for layer in self.layers
        ]
        self.seen_tokens = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M], repeats allowed, in that order."""
        for layer in self.layers:
            layer.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, for several samples of a prompt. The repeats of a sequence are neighbours."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the states of each beam by those of the beam that it continues, beam_idx [B]."""
        self.batch_select_indices(beam_idx)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back. With a delta-rule layer this takes `activate_past_recording()`."""
        return all(isinstance(layer, AttentionState) or layer.record_past for layer in self.layers)

    def activate_past_recording(self) -> None:
        """Let layers keep what `crop` needs from now on. A layer then runs up to 128 tokens one by one."""
        for layer in self.layers:
            if isinstance(layer, MixerState):
                layer.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, padding included, and forget what was kept for that.

        Delta-rule layers keep tokens that come after `activate_past_recording()` and after the last crop. They keep all
        tokens of the last call if it has at most 128, and at least the last 128 if so many came. The op of such a layer
        runs once more, on the kept tokens that stay. So its state gets the bits that it had after these tokens.

        Args:
            tokens_to_remove: minus the number of tokens, as in transformers. 0 takes none back.

        Raises:
            ValueError: if a layer did not keep so many tokens. Then no layer is changed.

        Example:
            >>> import torch
            >>> from flash_delta.models import FlashDeltaCache, FlashDeltaConfig, FlashDeltaModel
            >>> config = FlashDeltaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16)
            >>> cache = FlashDeltaCache(config)
            >>> cache.activate_past_recording()
            >>> out = FlashDeltaModel(config).eval()(torch.tensor([[1, 2, 3]]), cache=cache)
            >>> cache.crop(-2)
            >>> cache.get_seq_length()
            1
        """
        tokens = tokens_to_remove.item() if isinstance(tokens_to_remove, Tensor) else tokens_to_remove
        kept = min(layer.croppable for layer in self.layers)
        if not isinstance(tokens, int) or not -kept <= tokens <= 0:
            why = "so many are kept since the last crop" if self.is_croppable else "without activate_past_recording()"
            raise ValueError(f"tokens_to_remove: expected {-kept} to 0 ({why}), got {tokens}")
        for layer in self.layers:
            layer.crop(-tokens)
        self.seen_tokens += tokens

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, as do `early_initialization`, `prefetch` and `offload`."""
        raise NotImplementedError("cache.layers: expected each layer of the model to keep its own state, got a call")

    early_initialization = prefetch = offload = update
