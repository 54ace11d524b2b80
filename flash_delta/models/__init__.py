"""A Hugging Face language model whose token mixers are chosen by its configuration."""

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    message = "flash_delta.models needs transformers: pip install 'flash-delta[transformers]'"
    raise ImportError(message) from error

from flash_delta.models.cache import FlashDeltaCache
from flash_delta.models.configuration import FlashDeltaConfig
from flash_delta.models.from_fla import from_fla
from flash_delta.models.heads import FlashDeltaForCausalLM, FlashDeltaForSequenceClassification
from flash_delta.models.modeling import FlashDeltaModel
from flash_delta.models.parameter_groups import parameter_groups

AutoConfig.register(FlashDeltaConfig.model_type, FlashDeltaConfig)
AutoModel.register(FlashDeltaConfig, FlashDeltaModel)
AutoModelForCausalLM.register(FlashDeltaConfig, FlashDeltaForCausalLM)
AutoModelForSequenceClassification.register(FlashDeltaConfig, FlashDeltaForSequenceClassification)
# Trainer's label smoothing shifts labels only for models in this table, and `register` does not add them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FlashDeltaConfig.model_type] = FlashDeltaForCausalLM.__name__

__all__ = [
    "FlashDeltaCache",
    "FlashDeltaConfig",
    "FlashDeltaForCausalLM",
    "FlashDeltaForSequenceClassification",
    "FlashDeltaModel",
    "from_fla",
    "parameter_groups",
]
