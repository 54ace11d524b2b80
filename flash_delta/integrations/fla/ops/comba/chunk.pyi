from flash_delta.integrations.fla.calls import chunk_comba as chunk_comba
