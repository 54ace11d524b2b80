from flash_delta.integrations.fla.context import FLACPContext as FLACPContext
from flash_delta.integrations.fla.context import build_cp_context as build_cp_context
from flash_delta.integrations.fla.context import conv_cp_send_recv_bwd as conv_cp_send_recv_bwd
from flash_delta.integrations.fla.context import conv_cp_send_recv_fwd as conv_cp_send_recv_fwd
