"""Compiled kernels on threads, and the memory that they work in."""
