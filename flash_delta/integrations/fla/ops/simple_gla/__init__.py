"""fla.ops.simple_gla. All are :func:`flash_delta.chunk_simple_gla`, since they differ only in the order of sums."""

from flash_delta.integrations.fla.ops.simple_gla.chunk import chunk_simple_gla
from flash_delta.integrations.fla.ops.simple_gla.fused_chunk import fused_chunk_simple_gla
from flash_delta.integrations.fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla
from flash_delta.integrations.fla.ops.simple_gla.parallel import parallel_simple_gla

__all__ = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"]
