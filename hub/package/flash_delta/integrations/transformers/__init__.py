"""The functions alone. The library `kernels` binds them to models."""
