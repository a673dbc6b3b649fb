"""Kernels of layers whose state is not K/V."""
