"""fla.ops.gated_delta_rule.chunk."""

from flash_delta.ops import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "chunk_gdn"]

chunk_gdn = chunk_gated_delta_rule
