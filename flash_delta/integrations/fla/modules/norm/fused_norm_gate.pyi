from flash_delta.integrations.fla.norms import FusedRMSNormGated as FusedRMSNormGated
from flash_delta.integrations.fla.norms import rms_norm_gated as rms_norm_gated
