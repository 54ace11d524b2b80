"""fla.ops.gated_delta_rule.gate."""

from flash_delta.ops import fused_gdn_gate, naive_gdn_gate

__all__ = ["fused_gdn_gate", "naive_gdn_gate"]
