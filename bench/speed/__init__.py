"""Measurements of tokens per second."""
