from flash_delta.integrations.fla.calls import chunk_simple_gla as chunk_simple_gla
