"""fla.ops.comba.chunk."""

from flash_delta.ops import chunk_comba

__all__ = ["chunk_comba"]
