"""Building blocks around the delta rule: short causal convolution and RMS norms."""

from flash_delta.modules.convolution import ShortConvolution, causal_conv1d, causal_conv1d_update
from flash_delta.modules.norm import GatedRMSNorm, RMSNorm, gated_rms_norm, rms_norm

__all__ = [
    "GatedRMSNorm",
    "RMSNorm",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_rms_norm",
    "rms_norm",
]
