from flash_delta.kernels import require_triton

require_triton()
