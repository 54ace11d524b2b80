from flash_delta.integrations.fla.context import FLACPContext as FLACPContext
from flash_delta.integrations.fla.context import build_cp_context as build_cp_context
from flash_delta.integrations.fla.context import get_cp_cu_seqlens as get_cp_cu_seqlens
