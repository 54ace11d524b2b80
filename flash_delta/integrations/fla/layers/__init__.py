"""fla.layers: the token mixers with a gated delta rule."""

from flash_delta.integrations.fla.layers.gated_deltanet import GatedDeltaNet
from flash_delta.integrations.fla.layers.kda import KimiDeltaAttention

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]
