from flash_delta.integrations.fla.calls import chunk_gdn2 as chunk_gdn2
from flash_delta.integrations.fla.calls import fused_recurrent_gdn2 as fused_recurrent_gdn2
from flash_delta.integrations.fla.naive import naive_chunk_gdn2 as naive_chunk_gdn2
from flash_delta.integrations.fla.naive import naive_recurrent_gdn2 as naive_recurrent_gdn2
