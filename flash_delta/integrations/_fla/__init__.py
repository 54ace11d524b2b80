"""How fla's own code comes to run on this library: ``flash_delta.integrations.fla.register`` and ``install``."""
