"""Kernels checked and timed beside other implementations."""
