"""FlashDelta: a pre-norm decoder, x + mixer(norm(x)) then x + mlp(norm(x)), with a mixer of choice in every block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.layers.documents import number_documents
from flash_delta.models.block import FlashDeltaBlock
from flash_delta.models.cache import FlashDeltaCache
from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.models.loss import next_token_loss
from flash_delta.modules import RMSNorm, ShortConvolution
from flash_delta.parallel import ContextParallel

logger = logging.get_logger(__name__)


class FlashDeltaPreTrainedModel(PreTrainedModel):
    """What the models share: configuration, initialisation and what transformers should know about them."""

    config_class = FlashDeltaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # it is what softmax attention calls
    _no_split_modules = ("FlashDeltaBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias")
    _is_stateful = True  # the cache cannot be rolled back, as assisted generation would need

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            module.reset_parameters()
        elif isinstance(module, GatedDeltaNet | KimiDeltaAttention):
            A_log, dt_bias = module.initial_gate()
            init.copy_(module.A_log, A_log)
            init.copy_(module.dt_bias, dt_bias)


class FlashDeltaModel(FlashDeltaPreTrainedModel):
    """The decoder without its output layer: token ids -> hidden states.

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
        past_key_values: FlashDeltaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the blocks.

        Args:
            input_ids: [B, T], or inputs_embeds [B, T, hidden_size] in its place.
            attention_mask: [B, T], or [B, past + T] with a cache; zeros are padding, on either side.
            position_ids: [B, T] or [1, T], as in `GatedDeltaNet.forward`: documents in a row start at 0 each. By these
                positions softmax attention rotates queries and keys; None counts tokens from 0, padding excluded.
            past_key_values: the cache to continue from, extended in place; None starts anew.
            use_cache: whether to return a cache. None means config.use_cache, except in training, for packed rows and
                for rows with position_ids.
            output_hidden_states: whether to return hidden_states. None means config.output_hidden_states.
            output_attentions: accepted, with a warning: no mixer returns attention weights. None means
                config.output_attentions.
            cu_seqlens: boundaries [N + 1] of sequences packed in one row (B = 1), in place of attention_mask.
            cp_context: the split of one packed row over ranks, of which input_ids are this rank's tokens, in place of
                attention_mask and cu_seqlens; without a cache.

        Returns:
            last_hidden_state [B, T, hidden_size]; past_key_values (None without a cache); hidden_states (None unless
            asked for), the embeddings and what every block returns, the last of them normalised:
            num_hidden_layers + 1 times [B, T, hidden_size]; attentions, which are None always. With return_dict=False
            a tuple of those that are not None.

        Raises:
            ValueError: if not exactly one of input_ids and inputs_embeds is given, if the cache is another class's, if
                a cache is asked for under gradient checkpointing or with cp_context, or if position_ids have another
                shape or, on a CPU, start anew within a row that continues a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds, got both or neither")
        documents = position_ids is not None and position_ids.shape[-1] > 1
        packed = cu_seqlens is not None or cp_context is not None or documents
        cache = self._cache(past_key_values, use_cache, packed)
        if cache is not None and cp_context is not None:
            raise ValueError("use_cache: expected False with cp_context, where a rank has its own sequences only")
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

    def _cache(
        self, past_key_values: FlashDeltaCache | None, use_cache: bool | None, packed: bool
    ) -> FlashDeltaCache | None:
        if past_key_values is not None and not isinstance(past_key_values, FlashDeltaCache):
            raise ValueError(f"past_key_values: expected a FlashDeltaCache, got {type(past_key_values).__name__}")
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training and not packed)
        if not use_cache:
            return None
        if self.training and torch.is_grad_enabled() and self.gradient_checkpointing:
            raise ValueError("use_cache: expected False under gradient checkpointing, which runs every block twice")
        return FlashDeltaCache(self.config) if past_key_values is None else past_key_values


class FlashDeltaForCausalLM(FlashDeltaPreTrainedModel, GenerationMixin):
    """The decoder with its output layer: token ids -> logits of the next token, and the loss for given labels.

    Example:
        >>> import torch
        >>> from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
        >>> model = FlashDeltaForCausalLM(FlashDeltaConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16, attention_every=2,
        ...     num_attention_heads=4,
        ... ))
        >>> tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        >>> tokens.shape
        torch.Size([1, 7])
    """

    accepts_loss_kwargs = True  # num_items_in_batch, of Trainer
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers asks for a dict)

    def __init__(self, config: FlashDeltaConfig) -> None:
        super().__init__(config)
        self.model = FlashDeltaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: `generate` leaves making the cache to the model, whose states fit no cache of transformers."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FlashDeltaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cp_context: ContextParallel | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> CausalLMOutputWithPast:
        """Run the decoder and its output layer; arguments as in `FlashDeltaModel.forward`, and

        Args:
            labels: [B, T], usually input_ids; the label at t + 1 is the target at t. -100 is ignored, and so are the
                first token of every packed sequence or document and the tokens after the last sequence. Not with
                cp_context: a target may be another rank's token.
            logits_to_keep: compute the logits of the last so many tokens only, 0 means all; or those of the tokens with
                these indices [M]. Not with labels.
            num_items_in_batch: divide the sum over the targets by it, as Trainer asks for where a step has several
                batches; None means by the number of targets.
            cu_seq_lens_q: cu_seqlens by the name that `DataCollatorWithFlattening` gives it. What it adds,
                cu_seq_lens_k, max_length_q and max_length_k, says nothing more and is not read.

        Returns:
            loss (fp32 mean over the targets; None without labels), logits [B, T, vocab_size], and past_key_values,
            hidden_states and attentions as `FlashDeltaModel.forward`.

        Raises:
            ValueError: as `FlashDeltaModel.forward`; if labels come with logits_to_keep or cp_context or have another
                shape; if logits_to_keep has more than one dimension; if both cu_seqlens and cu_seq_lens_q are given.
        """
        if cu_seq_lens_q is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens: expected None with cu_seq_lens_q, another name for the same, got both")
            cu_seqlens = cu_seq_lens_q
        if labels is not None and cp_context is not None:
            raise ValueError("labels: expected None with cp_context, where a target may be another rank's token")
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise ValueError(f"logits_to_keep: expected 0 with labels, which need every logit, got {logits_to_keep}")
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            return_dict=True,
        )
        logits, loss = self.lm_head(_kept(output.last_hidden_state, logits_to_keep)), None
        if labels is not None:
            by_positions = position_ids is not None and cu_seqlens is None
            seq_idx = number_documents(position_ids, attention_mask) if by_positions else None
            loss = next_token_loss(logits, labels, cu_seqlens, seq_idx, num_items_in_batch)
        return CausalLMOutputWithPast(loss, logits, output.past_key_values, output.hidden_states)


class FlashDeltaForSequenceClassification(GenericForSequenceClassification, FlashDeltaPreTrainedModel):
    """The decoder with a linear layer on each row's last token that is not padding: token ids -> logits of a label.

    Rows are padded with config.pad_token_id. Labels, losses and config.num_labels are as everywhere in transformers.

    Example:
        >>> import torch
        >>> from flash_delta.models import FlashDeltaConfig, FlashDeltaForSequenceClassification
        >>> config = FlashDeltaConfig(
        ...     vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=16, attention_every=2,
        ...     num_attention_heads=4,
        ... )
        >>> config.num_labels, config.pad_token_id = 3, 0
        >>> FlashDeltaForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = False  # its loss is a mean over rows: Trainer divides it by the batches of a step


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if not isinstance(logits_to_keep, Tensor):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() > 1:
        raise ValueError(f"logits_to_keep: expected a number or indices [M], got {list(logits_to_keep.shape)}")
    return hidden_states[:, logits_to_keep]
