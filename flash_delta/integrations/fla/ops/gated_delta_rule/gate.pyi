from flash_delta.ops import fused_gdn_gate as fused_gdn_gate
from flash_delta.ops import naive_gdn_gate as naive_gdn_gate
