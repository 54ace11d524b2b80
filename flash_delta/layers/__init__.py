"""Token mixers as `nn.Module`s: Gated DeltaNet, Kimi Delta Attention, and softmax attention for hybrids."""

from flash_delta.layers.attention import Attention
from flash_delta.layers.gated_delta_net import GatedDeltaNet
from flash_delta.layers.kimi_delta_attention import KimiDeltaAttention
from flash_delta.layers.state import AttentionState, MixerState

__all__ = ["Attention", "AttentionState", "GatedDeltaNet", "KimiDeltaAttention", "MixerState"]
