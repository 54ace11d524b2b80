from flash_delta.integrations.fla.modules.causal_conv1d import *  # noqa: F403
