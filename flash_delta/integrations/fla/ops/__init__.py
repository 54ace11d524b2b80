"""fla.ops: the members of the gated delta rule's family."""

from flash_delta.integrations.fla.ops.comba import chunk_comba, fused_recurrent_comba
from flash_delta.integrations.fla.ops.delta_rule import (
    chunk_delta_rule,
    fused_chunk_delta_rule,
    fused_recurrent_delta_rule,
)
from flash_delta.integrations.fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from flash_delta.integrations.fla.ops.kda import chunk_kda, fused_recurrent_kda
from flash_delta.integrations.fla.ops.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_chunk_delta_rule",
    "fused_chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "parallel_simple_gla",
]
