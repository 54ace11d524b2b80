from flash_delta.integrations.fla.convolution import ShortConvolution as ShortConvolution
from flash_delta.integrations.fla.norms import FusedRMSNormGated as FusedRMSNormGated
from flash_delta.integrations.fla.norms import L2Norm as L2Norm
from flash_delta.integrations.fla.norms import RMSNorm as RMSNorm
