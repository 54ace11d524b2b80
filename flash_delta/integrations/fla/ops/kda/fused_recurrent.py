"""fla.ops.kda.fused_recurrent."""

from flash_delta.ops import fused_recurrent_kda

__all__ = ["fused_recurrent_kda"]
