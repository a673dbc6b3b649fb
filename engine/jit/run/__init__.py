"""Runs compiled kernels on threads, and provides their memory."""
