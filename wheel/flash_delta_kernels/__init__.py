"""Compiled kernels of flash_delta, which finds this package by its name. Nothing in here is to be called."""
