"""fla.ops.gated_delta_rule.fused_recurrent."""

from flash_delta.ops import fused_recurrent_gated_delta_rule

__all__ = ["fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]

fused_recurrent_gdn = fused_recurrent_gated_delta_rule
