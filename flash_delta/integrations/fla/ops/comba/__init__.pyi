from flash_delta.integrations.fla.calls import chunk_comba as chunk_comba
from flash_delta.integrations.fla.calls import fused_recurrent_comba as fused_recurrent_comba
from flash_delta.integrations.fla.naive import naive_chunk_comba as naive_chunk_comba
from flash_delta.integrations.fla.naive import naive_recurrent_comba as naive_recurrent_comba
