"""Compilation of kernels for this machine, and the cache of their machine code."""
