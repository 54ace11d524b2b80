from flash_delta.integrations.fla.norms import RMSNorm as RMSNorm
from flash_delta.integrations.fla.norms import rms_norm as rms_norm
