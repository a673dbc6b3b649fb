"""Measurements of kernels and steps on a GPU."""
