from flash_delta.ops import fused_kda_gate as fused_kda_gate
from flash_delta.ops import naive_kda_gate as naive_kda_gate
from flash_delta.ops import naive_kda_lowerbound_gate as naive_kda_lowerbound_gate
