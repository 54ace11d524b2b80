from flash_delta.kernels import modules_of, require_triton

require_triton()
__getattr__ = modules_of(__name__)
