from flash_delta.integrations.fla.calls import chunk_kda as chunk_kda
