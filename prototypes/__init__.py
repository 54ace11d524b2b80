"""Kernels that answered a design question, on which the instruments are tried. See README.md."""
