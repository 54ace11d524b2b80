"""fla.modules.fused_norm_gate, the older path of fla.modules.norm."""

from flash_delta.integrations.fla.modules.norm import FusedRMSNormGated

__all__ = ["FusedRMSNormGated"]
