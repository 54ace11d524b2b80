"""fla.ops.kda.chunk."""

from flash_delta import ops
from flash_delta.integrations._fla.beta import as_in_fla

__all__ = ["chunk_kda"]

chunk_kda = as_in_fla(ops.chunk_kda)
