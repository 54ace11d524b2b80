"""fla.modules: convolutions and norms that layers use around their ops."""

from flash_delta.integrations.fla.modules.causal_conv1d import ShortConvolution
from flash_delta.integrations.fla.modules.norm import FusedRMSNormGated, L2Norm, RMSNorm

__all__ = ["FusedRMSNormGated", "L2Norm", "RMSNorm", "ShortConvolution"]
