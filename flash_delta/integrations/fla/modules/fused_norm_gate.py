"""fla.modules.fused_norm_gate, the older path of fla.modules.norm.fused_norm_gate."""

from flash_delta.integrations.fla.modules.norm.fused_norm_gate import FusedRMSNormGated, rms_norm_gated

__all__ = ["FusedRMSNormGated", "rms_norm_gated"]
