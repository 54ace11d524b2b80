from flash_delta.integrations.fla.modules.norm.fused_norm_gate import *  # noqa: F403
