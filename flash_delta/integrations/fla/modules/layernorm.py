"""fla.modules.layernorm, the older path of fla.modules.norm."""

from flash_delta.integrations.fla.modules.norm import RMSNorm

__all__ = ["RMSNorm"]
