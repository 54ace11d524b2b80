"""fla.ops.delta_rule.fused_chunk."""

from flash_delta.ops import chunk_delta_rule

__all__ = ["fused_chunk_delta_rule"]

fused_chunk_delta_rule = chunk_delta_rule
