from flash_delta.integrations.fla.calls import chunk_kda as chunk_kda
from flash_delta.integrations.fla.calls import fused_recurrent_kda as fused_recurrent_kda
