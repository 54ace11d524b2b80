"""fla.ops.comba."""

from flash_delta.integrations.fla.ops.comba.chunk import chunk_comba
from flash_delta.integrations.fla.ops.comba.fused_recurrent import fused_recurrent_comba
from flash_delta.integrations.fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba

__all__ = ["chunk_comba", "fused_recurrent_comba", "naive_chunk_comba", "naive_recurrent_comba"]
