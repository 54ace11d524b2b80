from flash_delta.integrations.fla.norms import L2Norm as L2Norm
from flash_delta.integrations.fla.norms import l2_norm as l2_norm
from flash_delta.integrations.fla.norms import l2norm as l2norm
from flash_delta.integrations.fla.norms import l2norm_bwd as l2norm_bwd
from flash_delta.integrations.fla.norms import l2norm_fwd as l2norm_fwd
