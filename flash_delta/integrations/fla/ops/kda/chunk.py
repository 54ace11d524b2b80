"""fla.ops.kda.chunk."""

from flash_delta.ops import chunk_kda

__all__ = ["chunk_kda"]
