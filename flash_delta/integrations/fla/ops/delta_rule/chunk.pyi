from flash_delta.integrations.fla.calls import chunk_delta_rule as chunk_delta_rule
