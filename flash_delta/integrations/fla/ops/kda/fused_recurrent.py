"""fla.ops.kda.fused_recurrent."""

from flash_delta import ops
from flash_delta.integrations._fla.beta import as_in_fla

__all__ = ["fused_recurrent_kda"]

fused_recurrent_kda = as_in_fla(ops.fused_recurrent_kda)
