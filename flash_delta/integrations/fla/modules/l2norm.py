"""fla.modules.l2norm, the older path of fla.modules.norm.l2norm."""

from flash_delta.integrations.fla.modules.norm.l2norm import L2Norm, l2_norm, l2norm, l2norm_bwd, l2norm_fwd

__all__ = ["L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]
