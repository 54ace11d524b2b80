from flash_delta.kernels import modules_of

__getattr__ = modules_of(__name__)
