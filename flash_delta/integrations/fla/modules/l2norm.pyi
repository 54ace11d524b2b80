from flash_delta.integrations.fla.modules.norm.l2norm import *  # noqa: F403
