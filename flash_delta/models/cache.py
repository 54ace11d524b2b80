"""The states of a FlashDelta model between calls, as a cache for `generate` of transformers."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from flash_delta.layers import AttentionState, MixerState
from flash_delta.models.configuration import FlashDeltaConfig


class FlashDeltaCache(Cache):
    """One state per layer: `MixerState` (`.conv`, `.recurrent`) or, for softmax attention, `AttentionState`.

    The last tokens cannot be removed from a recurrent state, so `crop` raises an error.

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
    is_croppable = False

    def __init__(self, config: FlashDeltaConfig) -> None:
        super().__init__(layers=[AttentionState() if name == "attention" else MixerState() for name in config.mixers])
        self.seen_tokens = 0

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
        self.layers = [type(layer)() for layer in self.layers]
        self.seen_tokens = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` [M], repeats allowed, in that order."""
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the states of each beam by those of the beam that it continues, beam_idx [B]."""
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError, because an earlier recurrent state cannot be computed from a later one."""
        raise NotImplementedError("crop: a recurrent state cannot be rolled back; keep a copy of the cache instead")
