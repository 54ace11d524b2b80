"""fla.ops.kda.gate."""

from flash_delta.ops import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate

__all__ = ["fused_kda_gate", "naive_kda_gate", "naive_kda_lowerbound_gate"]
