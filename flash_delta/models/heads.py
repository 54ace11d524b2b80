"""The decoder with an output layer, for next tokens and their loss or for labels of rows."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from flash_delta.layers.documents import number_documents
from flash_delta.models.cache import FlashDeltaCache
from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.models.loss import next_token_loss
from flash_delta.models.modeling import FlashDeltaModel, FlashDeltaPreTrainedModel, one_name
from flash_delta.parallel import ContextParallel

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"  # before 5.24


class FlashDeltaForCausalLM(FlashDeltaPreTrainedModel, GenerationMixin):
    """The decoder with its output layer: token ids -> logits of the next token, and the loss for given labels.

    Args:
        config: the sizes, and which layer mixes tokens how.

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

    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers asks for a dict)

    def __init__(self, config: FlashDeltaConfig) -> None:
        super().__init__(config)
        self.model = FlashDeltaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False, so that `generate` makes no cache of transformers, which our states do not fit."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Gives `generate` a cache. With `prefill_chunk_size` it needs one before it calls the model."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = FlashDeltaCache(self.config)
            if generation_config.is_assistant:  # its drafts may be rejected
                model_kwargs[CACHE].activate_past_recording()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, because the paged cache of transformers has no place for recurrent states."""
        raise NotImplementedError(
            "generate_batch: expected a model whose layers keep keys and values only, as a paged cache of transformers "
            f"does, got a {type(self).__name__}: use generate"
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: FlashDeltaCache | None = None,
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
        seq_idx: Tensor | None = None,
        past_key_values: FlashDeltaCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Run the decoder and its output layer; arguments as in `FlashDeltaModel.forward`, and

        Args:
            labels: [B, T], usually input_ids; the label at t + 1 is the target at t. -100 is ignored, and so are the
                first token of every packed sequence or document and the tokens after the last sequence. Not allowed
                with cp_context, because a target may be another rank's token.
            logits_to_keep: how many of the last tokens get logits, where 0 means all; or the indices [M] of the tokens
                that get logits. Not allowed with labels.
            num_items_in_batch: the loss is the sum over the targets divided by this number. Trainer passes it if a step
                has several batches. None means the number of targets.

        Returns:
            loss (fp32 mean over the targets; None without labels), logits [B, T, vocab_size], and the cache,
            hidden_states and attentions as `FlashDeltaModel.forward`.

        Raises:
            ValueError: as `FlashDeltaModel.forward`; if labels come with logits_to_keep or cp_context or have another
                shape; if logits_to_keep has more than one dimension.
        """
        cu_seqlens = one_name(cu_seqlens=cu_seqlens, cu_seq_lens_q=cu_seq_lens_q)
        if labels is not None and cp_context is not None:
            raise ValueError(
                "labels: expected None with cp_context (a target may be another rank's token), got a tensor"
            )
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep != 0):
            raise ValueError(f"logits_to_keep: expected 0 with labels, which need every logit, got {logits_to_keep}")
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            seq_idx=seq_idx,
            past_key_values=past_key_values,
            return_dict=True,
        )
        logits, loss = self.lm_head(_kept(output.last_hidden_state, logits_to_keep)), None
        if labels is not None:
            by_positions = position_ids is not None and cu_seqlens is None
            documents = number_documents(position_ids, attention_mask) if by_positions else None
            loss = next_token_loss(logits, labels, cu_seqlens, documents, num_items_in_batch)
        return CausalLMOutputWithPast(loss, logits, getattr(output, CACHE), output.hidden_states)


class FlashDeltaForSequenceClassification(GenericForSequenceClassification, FlashDeltaPreTrainedModel):
    """The decoder with a linear layer on each row's last token that is not padding: token ids -> logits of a label.

    Rows are padded with config.pad_token_id. Labels, losses and config.num_labels are as everywhere in transformers.

    Args:
        config: the sizes, and which layer mixes tokens how.

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

    accepts_loss_kwargs = False  # a mean over rows: Trainer divides it by the number of batches


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if not isinstance(logits_to_keep, Tensor):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() > 1:
        raise ValueError(f"logits_to_keep: expected a number or indices [M], got {list(logits_to_keep.shape)}")
    return hidden_states[:, logits_to_keep]
