"""Makes an installed fla run on this library: ``flash_delta.integrations.fla.register``."""
