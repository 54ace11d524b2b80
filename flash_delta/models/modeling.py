"""FlashDelta: a pre-norm decoder, x + mixer(norm(x)) then x + mlp(norm(x)), with a chosen mixer in every block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from flash_delta.layers._delta_mixer import DeltaMixer
from flash_delta.models.block import FlashDeltaBlock
from flash_delta.models.cache import FlashDeltaCache
from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.modules import RMSNorm, ShortConvolution
from flash_delta.parallel import ContextParallel

logger = logging.get_logger(__name__)


class FlashDeltaPreTrainedModel(PreTrainedModel):
    """The parts that the models share: configuration, initialisation and settings that transformers reads."""

    config_class = FlashDeltaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # softmax attention calls it
    _no_split_modules = ("FlashDeltaBlock",)
    _skip_keys_device_placement = ("cache", "past_key_values")  # its name since transformers 5.24, and before
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias")
    _is_stateful = not hasattr(Cache, "activate_past_recording")  # older transformers lets no cache record its past

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            module.reset_parameters()
        elif isinstance(module, DeltaMixer) and hasattr(module, "A_log"):  # "gdp" may have no gate
            A_log, dt_bias = module.initial_gate()
            init.copy_(module.A_log, A_log)
            init.copy_(module.dt_bias, dt_bias)


class FlashDeltaModel(FlashDeltaPreTrainedModel):
    """The decoder without its output layer: token ids -> hidden states.

    Args:
        config: the sizes, and which layer mixes tokens how.

    Example:
        >>> import torch
        >>> from flash_delta.models import FlashDeltaConfig, FlashDeltaModel
        >>> model = FlashDeltaModel(FlashDeltaConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16, attention_every=2,
        ...     num_attention_heads=4,
        ... ))
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 64])
    """

    def __init__(self, config: FlashDeltaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FlashDeltaBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.gradient_checkpointing = False  # set by transformers
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: FlashDeltaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        past_key_values: FlashDeltaCache | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the blocks.

        Args:
            input_ids: [B, T], or inputs_embeds [B, T, hidden_size] in its place.
            attention_mask: [B, T], or [B, past + T] with a cache; zeros are padding, on either side.
            position_ids: [B, T] or [1, T], as in `GatedDeltaNet.forward`: each document in a row starts at 0. Softmax
                attention rotates queries and keys by these positions. None counts tokens from 0, without padding.
            cache: the cache to continue from, which is extended in place. None starts without a cache.
            use_cache: whether to return a cache. None means config.use_cache, except in training, for packed rows and
                for rows with position_ids.
            output_hidden_states: whether to return hidden_states. None means config.output_hidden_states.
            output_attentions: accepted with a warning, since no mixer returns attention weights. None means
                config.output_attentions.
            cu_seqlens: boundaries [N + 1] of sequences packed in one row (B = 1), in place of attention_mask.
            cp_context: the split of one packed row over ranks, in place of attention_mask and cu_seqlens, and without a
                cache. input_ids are this rank's tokens.
            cu_seq_lens_q: cu_seqlens under the name that `DataCollatorWithFlattening` uses. What the collator adds
                contains nothing more and is not read: cu_seq_lens_k, max_length_q, max_length_k and seq_idx. The last
                is only allowed with position_ids or cu_seqlens.
            past_key_values: the other name of cache. It is what transformers before 5.24 calls a cache.

        Returns:
            last_hidden_state [B, T, hidden_size]; the cache (None without one), under the name that the installed
            transformers gives it: cache, or past_key_values before 5.24; hidden_states (None unless asked for): the
            embeddings and the output of every block, num_hidden_layers + 1 times [B, T, hidden_size], of which the last
            is normalised; attentions, which are always None. With return_dict=False a tuple of the results that are not
            None.

        Raises:
            ValueError: if not exactly one of input_ids and inputs_embeds is given, if the cache is another class's, if
                cache or cu_seqlens is given under both names, if seq_idx comes alone, if a cache is asked for under
                gradient checkpointing or with cp_context, or if position_ids have another shape or, on a CPU, start
                anew within a row that continues a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids: expected either input_ids or inputs_embeds, got {got}")
        cu_seqlens = one_name(cu_seqlens=cu_seqlens, cu_seq_lens_q=cu_seq_lens_q)
        if seq_idx is not None and cu_seqlens is None and position_ids is None:
            raise ValueError("position_ids: expected positions [B, T] that restart at 0 with seq_idx, got None")
        documents = position_ids is not None and position_ids.shape[-1] > 1
        packed = cu_seqlens is not None or cp_context is not None or documents
        cache = self._cache(one_name(cache=cache, past_key_values=past_key_values), use_cache, packed)
        if cache is not None and cp_context is not None:
            raise ValueError("use_cache: expected False with cp_context (a rank has its own sequences only), got True")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions if output_attentions is not None else self.config.output_attentions:
            logger.warning_once("output_attentions: no mixer of this model returns attention weights: they are None")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        states = [None] * len(self.layers) if cache is None else cache.layers
        inputs = ()
        for block, state in zip(self.layers, states, strict=True):
            if output_hidden_states:
                inputs += (hidden_states,)
            hidden_states = block(hidden_states, attention_mask, state, cu_seqlens, cp_context, position_ids)
        if cache is not None:
            cache.seen_tokens += hidden_states.shape[1]
        last = self.norm(hidden_states)
        return BaseModelOutputWithPast(last, cache, (*inputs, last) if output_hidden_states else None)

    def _cache(self, given: FlashDeltaCache | None, use_cache: bool | None, packed: bool) -> FlashDeltaCache | None:
        if given is not None and not isinstance(given, FlashDeltaCache):
            raise ValueError(f"cache (or past_key_values): expected a FlashDeltaCache, got {type(given).__name__}")
        if use_cache is None:
            use_cache = given is not None or (self.config.use_cache and not self.training and not packed)
        if not use_cache:
            return None
        if self.training and torch.is_grad_enabled() and self.gradient_checkpointing:
            raise ValueError(
                "use_cache: expected False under gradient checkpointing (it runs every block twice), got True"
            )
        return FlashDeltaCache(self.config) if given is None else given


def one_name(**names: Any) -> Any:
    """The value of an argument that has two names.

    Raises:
        ValueError: if it is given under both.
    """
    (name, value), (other, same) = names.items()
    if value is not None and same is not None:
        raise ValueError(f"{name}: expected None with {other}, its other name, got both")
    return same if value is None else value
