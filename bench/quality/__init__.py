"""Measurements of the quality of cache types."""
