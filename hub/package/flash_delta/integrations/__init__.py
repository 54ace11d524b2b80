"""What transformers takes of this library through `kernels`."""
