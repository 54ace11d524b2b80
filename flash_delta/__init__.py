"""Gated-delta-rule linear attention: Gated DeltaNet, Kimi Delta Attention and their family."""

from flash_delta.ops import Explanation as Explanation
from flash_delta.ops import chunk_comba as chunk_comba
from flash_delta.ops import chunk_delta_rule as chunk_delta_rule
from flash_delta.ops import chunk_gated_delta_product as chunk_gated_delta_product
from flash_delta.ops import chunk_gated_delta_rule as chunk_gated_delta_rule
from flash_delta.ops import chunk_gdn2 as chunk_gdn2
from flash_delta.ops import chunk_kda as chunk_kda
from flash_delta.ops import chunk_simple_gla as chunk_simple_gla
from flash_delta.ops import decode_gated_delta_product as decode_gated_delta_product
from flash_delta.ops import decode_gated_delta_rule as decode_gated_delta_rule
from flash_delta.ops import decode_gdn2 as decode_gdn2
from flash_delta.ops import decode_kda as decode_kda
from flash_delta.ops import erase_norm as erase_norm
from flash_delta.ops import explain as explain
from flash_delta.ops import forbid_compilation as forbid_compilation
from flash_delta.ops import fused_gdn_gate as fused_gdn_gate
from flash_delta.ops import fused_kda_gate as fused_kda_gate
from flash_delta.ops import fused_recurrent_gated_delta_product as fused_recurrent_gated_delta_product
from flash_delta.ops import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from flash_delta.ops import fused_recurrent_gdn2 as fused_recurrent_gdn2
from flash_delta.ops import fused_recurrent_kda as fused_recurrent_kda
from flash_delta.ops import guard_erase as guard_erase
from flash_delta.ops import naive_gdn_gate as naive_gdn_gate
from flash_delta.ops import naive_kda_gate as naive_kda_gate
from flash_delta.ops import naive_kda_lowerbound_gate as naive_kda_lowerbound_gate
from flash_delta.ops import prefill_gated_delta_product as prefill_gated_delta_product
from flash_delta.ops import prefill_gated_delta_rule as prefill_gated_delta_rule
from flash_delta.ops import prefill_gdn2 as prefill_gdn2
from flash_delta.ops import prefill_kda as prefill_kda

__version__ = "0.3.0"
