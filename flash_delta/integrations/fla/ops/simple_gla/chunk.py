"""fla.ops.simple_gla.chunk."""

from flash_delta.ops import chunk_simple_gla

__all__ = ["chunk_simple_gla"]
