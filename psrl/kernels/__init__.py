"""Attention over shared prefixes: PyTorch reference, CPU path and Triton kernels."""
