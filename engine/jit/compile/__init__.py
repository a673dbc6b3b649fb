"""Kernels compiled for this machine, and kept for the next process."""
