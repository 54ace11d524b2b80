from flash_delta.integrations.fla.calls import chunk_gdn2 as chunk_gdn2
