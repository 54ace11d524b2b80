"""fla.ops.kda."""

from flash_delta.integrations.fla.ops.kda.chunk import chunk_kda
from flash_delta.integrations.fla.ops.kda.fused_recurrent import fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]
