"""Kernels of products with weights in tiles."""
