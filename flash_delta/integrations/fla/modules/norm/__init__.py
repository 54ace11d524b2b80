"""fla.modules.norm."""

from flash_delta.integrations.fla.modules.norm.fused_norm_gate import FusedRMSNormGated
from flash_delta.integrations.fla.modules.norm.l2norm import L2Norm
from flash_delta.integrations.fla.modules.norm.layernorm import RMSNorm

__all__ = ["FusedRMSNormGated", "L2Norm", "RMSNorm"]
