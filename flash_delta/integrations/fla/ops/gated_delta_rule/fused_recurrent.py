"""fla.ops.gated_delta_rule.fused_recurrent."""

from flash_delta import ops
from flash_delta.integrations._fla.beta import as_in_fla

__all__ = ["fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]

fused_recurrent_gdn = fused_recurrent_gated_delta_rule = as_in_fla(ops.fused_recurrent_gated_delta_rule)
