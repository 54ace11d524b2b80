from flash_delta.integrations.fla.modules.norm.layernorm import *  # noqa: F403
