"""fla.ops.cp: one packed row on many ranks."""

from flash_delta.integrations.fla.ops.cp.comm import conv_cp_send_recv_bwd, conv_cp_send_recv_fwd
from flash_delta.integrations.fla.ops.cp.context import FLACPContext, build_cp_context

__all__ = ["FLACPContext", "build_cp_context", "conv_cp_send_recv_bwd", "conv_cp_send_recv_fwd"]
