"""fla.layers: the token mixers of this library's members."""

from flash_delta.integrations.fla.layers.comba import Comba
from flash_delta.integrations.fla.layers.delta_net import DeltaNet
from flash_delta.integrations.fla.layers.gated_deltanet import GatedDeltaNet
from flash_delta.integrations.fla.layers.kda import KimiDeltaAttention
from flash_delta.integrations.fla.layers.simple_gla import SimpleGatedLinearAttention

__all__ = ["Comba", "DeltaNet", "GatedDeltaNet", "KimiDeltaAttention", "SimpleGatedLinearAttention"]
