from flash_delta.integrations.fla.naive import naive_chunk_kda as naive_chunk_kda
from flash_delta.integrations.fla.naive import naive_recurrent_kda as naive_recurrent_kda
