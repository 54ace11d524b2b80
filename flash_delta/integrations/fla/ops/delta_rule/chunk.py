"""fla.ops.delta_rule.chunk."""

from flash_delta.ops import chunk_delta_rule

__all__ = ["chunk_delta_rule"]
