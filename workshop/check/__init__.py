"""What is checked beyond `flash-delta check`: layers, elementwise ops, and kernels in Triton's interpreter."""
