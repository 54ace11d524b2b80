"""Token mixers as `nn.Module`s: one for each member of the family, and softmax attention for hybrid models."""

from flash_delta.layers import _fully_shard  # noqa: F401 (so that FSDP2 keeps gates in float32)
from flash_delta.layers.attention import Attention
from flash_delta.layers.comba import Comba
from flash_delta.layers.delta_net import DeltaNet
from flash_delta.layers.gated_delta_net import GatedDeltaNet, GatedDeltaProduct
from flash_delta.layers.kimi_delta_attention import GatedDeltaNet2, KimiDeltaAttention
from flash_delta.layers.simple_gla import SimpleGatedLinearAttention
from flash_delta.layers.state import AttentionState, MixerState
from flash_delta.layers.tensor_parallel import tensor_parallel_plan

__all__ = [
    "Attention",
    "AttentionState",
    "Comba",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "MixerState",
    "SimpleGatedLinearAttention",
    "tensor_parallel_plan",
]
