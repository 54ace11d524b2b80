"""Makes fla's own code run on this library: ``flash_delta.integrations.fla.register`` and ``install``."""
