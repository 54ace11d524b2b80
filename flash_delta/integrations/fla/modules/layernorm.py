"""fla.modules.layernorm, the older path of fla.modules.norm.layernorm."""

from flash_delta.integrations.fla.modules.norm.layernorm import RMSNorm, rms_norm

__all__ = ["RMSNorm", "rms_norm"]
