"""Serving: states live in the slots of a pool, and a call updates the states of its batch in place."""

from flash_delta.ops.serving.around import Convolution, OutputNorm
from flash_delta.ops.serving.decode import decode_gated_delta_rule, decode_kda
from flash_delta.ops.serving.gdn2 import decode_gdn2, prefill_gdn2
from flash_delta.ops.serving.int8 import Int8States, dequantize_states, quantize_states
from flash_delta.ops.serving.memory import workspace_bytes
from flash_delta.ops.serving.prefill import prefill_gated_delta_rule, prefill_kda
from flash_delta.ops.serving.product import decode_gated_delta_product, prefill_gated_delta_product
from flash_delta.ops.serving.ring import Ring, commit
from flash_delta.ops.serving.warmup import warmup

__all__ = [
    "Convolution",
    "Int8States",
    "OutputNorm",
    "Ring",
    "commit",
    "decode_gated_delta_product",
    "decode_gated_delta_rule",
    "decode_gdn2",
    "decode_kda",
    "dequantize_states",
    "prefill_gated_delta_product",
    "prefill_gated_delta_rule",
    "prefill_gdn2",
    "prefill_kda",
    "quantize_states",
    "warmup",
    "workspace_bytes",
]
